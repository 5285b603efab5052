"""The exchange of gradients: hooks submit them during backward, and `finish` puts the reduced ones in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.compat.horovod.compression import Compressor
from paceline.compat.horovod.handles import synchronize
from paceline.compat.horovod.operations import RepeatedReduction, grouped_allreduce_async_, sparse_allreduce_async
from paceline.compat.horovod.process_sets import ProcessSet
from paceline.compat.horovod.requests import Reduction

__all__ = ["GradientExchange", "named_parameters_of"]

Submit = Callable[[Tensor], Callable[[], None]]  # begins the exchange for a parameter; what it returns finishes it


def named_parameters_of(
    optimizer: Optimizer, named_parameters: Iterable[tuple[str, Tensor]] | None
) -> dict[Tensor, str]:
    """Return the name of each parameter. Raises ValueError where one of the optimizer's has none, or a name occurs
    twice."""
    groups = optimizer.param_groups
    if named_parameters is None:
        named: list[Any] = [
            (f"allreduce.noname.{i}.{j}", one)
            for i, group in enumerate(groups)
            for j, one in enumerate(group["params"])
        ]
    else:
        named = list(named_parameters)
    if any(not isinstance(one, tuple) for one in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    found = {one: name for name, one in named}
    unnamed = [one for group in groups for one in group["params"] if one not in found]
    if unnamed:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: "
            f"{len(unnamed)}, the first of shape {list(unnamed[0].shape)}"
        )
    return found


class GradientExchange:
    """The gradients of one optimizer. All members of the process set have one with the same names."""

    def __init__(
        self,
        names: dict[Tensor, str],
        *,
        compression: type[Compressor],
        passes: int,
        reduction: int,
        predivide: float,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.names, self.compression, self.passes = names, compression, passes
        self.reduction, self.process_set = reduction, process_set
        self._predivide, self._sparse_as_dense = predivide, sparse_as_dense
        self._left: dict[Tensor, int] = {}  # backward passes until the gradient travels
        self._repeated: dict[Tensor, RepeatedReduction] = {}
        self._group_of: dict[Tensor, list[Tensor]] = {}
        self._ready: dict[int, set[Tensor]] = {}  # of each group: whose gradients are there
        self._finishers: dict[int, Callable[[], None]] = {}  # of what travels, by the id of parameter or group
        self._seen: set[Tensor] = set()  # backward has had them since the last `finish`
        self._submit: Submit = self._submit_one
        self._watched: list[Tensor] = []

    @property
    def is_under_way(self) -> bool:
        """Whether backward has computed gradients that were not waited for."""
        return bool(self._seen)

    def watch(self, groups: Sequence[list[Tensor]], *, submit: Submit | None = None) -> None:
        """Submit gradients from now on when backward has them. `groups` travel as one operation."""
        self._submit = submit or self._submit_one
        for group in groups:
            self._ready[id(group)] = set()
            self._group_of.update(dict.fromkeys(group, group))
        for parameter in self.names:
            if parameter.requires_grad:
                self._watched.append(parameter)
                self._left[parameter] = self.passes
                parameter.register_post_accumulate_grad_hook(self._hook)

    def set_passes(self, passes: int) -> None:
        self.passes = passes
        self._left = dict.fromkeys(self._left, passes)

    def forget(self) -> None:
        """Forget what is under way."""
        self._finishers.clear()
        self._seen.clear()
        self._left = dict.fromkeys(self._left, self.passes)
        self._ready = {key: set() for key in self._ready}

    def finish(self) -> None:
        """Wait until all gradients are reduced, and put them in place. What backward has not computed travels as
        zeros: another worker may have computed it."""
        for parameter in self._watched:
            group = self._group_of.get(parameter)
            if (id(parameter) if group is None else id(group)) not in self._finishers:
                self._begin(parameter)
        finishers = list(self._finishers.values())
        self.forget()
        for finisher in finishers:
            finisher()

    def _hook(self, parameter: Tensor) -> None:
        left = self._left[parameter]
        if left <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        self._left[parameter] = left - 1
        self._seen.add(parameter)
        if left > 1:
            return
        group = self._group_of.get(parameter)
        if group is None:
            self._begin(parameter)
            return
        ready = self._ready[id(group)]
        ready.add(parameter)
        if len(ready) == len(group):
            self._begin(parameter)

    def _begin(self, parameter: Tensor) -> None:
        group = self._group_of.get(parameter)
        if group is None:
            self._finishers[id(parameter)] = self._submit(parameter)
        else:
            self._finishers[id(group)] = self._submit_group(group)

    def _submit_one(self, parameter: Tensor) -> Callable[[], None]:
        gradient = _gradient_of(parameter)
        name, is_sparse = self.names[parameter], gradient.is_sparse
        if is_sparse and not self._sparse_as_dense:
            wait = sparse_allreduce_async(gradient, name, self.reduction, self.process_set)

            def finish_sparse() -> None:
                parameter.grad = wait()

            return finish_sparse
        small, context = self.compression.compress(gradient.to_dense() if is_sparse else gradient)
        repeated = self._repeated.get(parameter)
        if repeated is None:
            is_mean = self.reduction == Reduction.AVERAGE
            repeated = self._repeated[parameter] = RepeatedReduction(
                name,
                reduction=self.reduction,
                prescale=1.0 / self._predivide if is_mean else 1.0,
                postscale=self._predivide if is_mean else 1.0,
                process_set=self.process_set,
            )
        handle = repeated.begin(small)

        def finish() -> None:
            result = self.compression.decompress(synchronize(handle), context)
            if is_sparse:
                parameter.grad = result.to_sparse()
            elif result is not gradient:
                gradient.copy_(result)

        return finish

    def _submit_group(self, group: Sequence[Tensor]) -> Callable[[], None]:
        gradients = [_dense_gradient_of(one) for one in group]
        small, contexts = zip(*[self.compression.compress(one) for one in gradients], strict=True)
        is_mean = self.reduction == Reduction.AVERAGE
        handle = grouped_allreduce_async_(
            list(small),
            None,
            f"group.{self.names[group[0]]}",
            self.reduction,
            1.0 / self._predivide if is_mean else 1.0,
            self._predivide if is_mean else 1.0,
            self.process_set,
        )

        def finish() -> None:
            results = synchronize(handle)
            for gradient, result, context in zip(gradients, results, contexts, strict=True):
                full = self.compression.decompress(result, context)
                if full is not gradient:
                    gradient.copy_(full)

        return finish


def _gradient_of(parameter: Tensor) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter.data)
    return parameter.grad


def _dense_gradient_of(parameter: Tensor) -> Tensor:
    gradient = _gradient_of(parameter)
    if gradient.is_sparse:
        raise ValueError("Sparse gradients do not travel in groups: leave out groups, or use sparse_as_dense=True.")
    return gradient
