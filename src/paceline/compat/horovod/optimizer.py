"""`DistributedOptimizer`: an optimizer that averages gradients over all workers before it takes a step.

It becomes a subclass of the optimizer's own class, with the same state and parameter groups. A hook on each parameter
submits its gradient as soon as backward has it, so the sums are on their way while backward goes on; `step` waits.
"""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.adasum_optimizer import AdasumDelta
from paceline.compat.horovod.compression import Compression, Compressor
from paceline.compat.horovod.functions import broadcast_object
from paceline.compat.horovod.gradients import GradientExchange, named_parameters_of
from paceline.compat.horovod.process_sets import ProcessSet, global_process_set
from paceline.compat.horovod.progress import step_done
from paceline.compat.horovod.requests import Reduction

__all__ = ["DistributedOptimizer"]

Groups = int | Sequence[Sequence[Tensor]] | None


def DistributedOptimizer(  # Horovod's name
    optimizer: Optimizer,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Reduction.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer like the one given, which reduces gradients over the members of the process set.

    :param named_parameters: names by which gradients are matched; without them, by their place.
    :param backward_passes_per_step: gradients of so many backward passes are added up before they travel.
    :param gradient_predivide_factor: an average divides by this before the sum, and by the rest behind it.
    :param groups: so many groups, or lists of parameters, whose gradients travel as one operation.
    :param sparse_as_dense: sparse gradients travel as dense ones.
    :raises ValueError: values that do not fit, or names that are missing or occur twice.
    """
    if gradient_predivide_factor != 1.0 and op != Reduction.AVERAGE:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups:
        warnings.warn(
            "Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        groups = num_groups if groups is None else groups
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    parameters = named_parameters_of(optimizer, named_parameters)
    _check_groups(groups)
    is_adasum = op == Reduction.ADASUM and sessions.is_open() and sessions.current_session().size > 1
    if is_adasum and process_set is not global_process_set:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    part = AdasumOptimizer if is_adasum else ReducingOptimizer
    own: Any = type(optimizer)
    made: Any = object.__new__(type(own.__name__, (part, own), {"__module__": part.__module__}))
    made.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})  # a scheduler's
    exchange = GradientExchange(
        parameters,
        compression=compression,
        passes=backward_passes_per_step,
        reduction=op,
        predivide=gradient_predivide_factor,
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
    )
    made.begin_with(exchange, groups)
    return made


class _Distributed:
    """What both kinds have in common; the optimizer's own class comes behind it."""

    exchange: GradientExchange
    param_groups: list[dict[str, Any]]

    @property
    def backward_passes_per_step(self) -> int:
        return self.exchange.passes

    @property
    def process_set(self) -> ProcessSet:
        return self.exchange.process_set

    @property
    def _parameter_names(self) -> Mapping[Tensor, str]:
        return self.exchange.names

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Add up the gradients of so many backward passes from now on."""
        self.exchange.set_passes(passes)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients. Raises AssertionError between backward and `step` or `synchronize`, where they are
        under way."""
        if self.exchange.is_under_way:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    def step_without_synchronizing(self) -> None:
        """Take a step of the optimizer itself."""
        super().step()  # pyright: ignore[reportAttributeAccessIssue]


class ReducingOptimizer(_Distributed):
    """Averages or sums gradients; `step` waits for them."""

    _has_synchronized, _synchronizes = False, True
    _waited_s = 0.0  # for gradients, since the last step

    def begin_with(self, exchange: GradientExchange, groups: Groups) -> None:
        """Watch the gradients of the parameters, if there is another worker to agree with."""
        self.exchange, self._has_synchronized, self._synchronizes = exchange, False, True
        session = sessions.current_session() if sessions.is_open() else None
        if session is None or not exchange.process_set.included():
            return
        if session.size > 1 or session.variables.is_elastic:
            exchange.watch(_grouped(exchange, groups))

    def synchronize(self) -> None:
        """Wait until all gradients are reduced. Those that backward has not computed count as zeros."""
        self._wait()
        self._has_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have `step` not wait: `synchronize` was called before, to clip gradients for example."""
        self._synchronizes = False
        try:
            yield
        finally:
            self._synchronizes = True

    def step(self, closure: Any = None) -> Any:
        """Wait for the gradients, and take the step; with a closure, after each backward of it."""
        if self._synchronizes and self._has_synchronized:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This can cause training slowdown. You may want to consider using optimizer.skip_synchronize() context "
                "if you use optimizer.synchronize() in your code.",
                stacklevel=2,
            )
        self._has_synchronized = False
        closures_s = 0.0

        def synchronized() -> Any:
            nonlocal closures_s
            began_s = time.perf_counter()
            loss = closure()
            if self._synchronizes:
                self._wait()
            closures_s += time.perf_counter() - began_s
            return loss

        if self._synchronizes and closure is None:
            self._wait()
        began_s = time.perf_counter()
        value = super().step(*([] if closure is None else [synchronized]))  # pyright: ignore[reportAttributeAccessIssue]
        stepped_s = time.perf_counter() - began_s - closures_s
        waited_s, self._waited_s = self._waited_s, 0.0
        step_done(self, waited_s=waited_s, stepped_s=stepped_s)
        return value

    def _wait(self) -> None:
        began_s = time.perf_counter()
        self.exchange.finish()
        self._waited_s += time.perf_counter() - began_s

    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Load a state; what was under way is forgotten."""
        self.exchange.forget()
        self._has_synchronized, self._synchronizes = False, True
        super().load_state_dict(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]

    # torch adds hooks to a class's `step` unless it has some: the optimizer's own `step` calls them, once.
    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]


class AdasumOptimizer(_Distributed):
    """Takes the step first, each worker by itself, and combines the changes of the weights by Adasum."""

    def begin_with(self, exchange: GradientExchange, groups: Groups) -> None:
        """Watch the gradients of the parameters. Groups are not used: each parameter is combined by itself."""
        self.exchange = exchange
        self._delta = AdasumDelta(exchange, self.param_groups, self.step_without_synchronizing)
        exchange.watch([], submit=self._delta.submit)

    def synchronize(self) -> None:
        """Does nothing: `step` waits."""

    def skip_synchronize(self) -> Any:
        """Not possible here: raises AssertionError."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Any = None) -> Any:
        """Wait for the combined changes of all weights, and apply them."""
        loss = None if closure is None else closure()
        began_s = time.perf_counter()
        self._delta.finish()
        step_done(self, waited_s=time.perf_counter() - began_s, stepped_s=0.0)  # the steps were taken in backward
        return loss

    step.hooked = True  # pyright: ignore[reportFunctionMemberAccess]


def _check_groups(groups: Groups) -> None:
    if groups is None:
        return
    if isinstance(groups, int):
        if groups <= 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    seen: set[int] = set()
    for one in groups:
        for parameter in one:
            if not isinstance(parameter, torch.Tensor):
                raise ValueError("groups must consist of torch.Tensor.")
            if id(parameter) in seen:
                raise ValueError("A parameter can only appear once in groups.")
            seen.add(id(parameter))


def _grouped(exchange: GradientExchange, groups: Groups) -> list[list[Tensor]]:
    """Return the parameters that travel together, the same on all members: in the order of the first one."""
    if groups is None:
        return []
    trained = {name: one for one, name in exchange.names.items() if one.requires_grad}
    members = exchange.process_set.ranks or [0]
    order = broadcast_object(list(trained), members[0], "horovod.groups", exchange.process_set)
    parameters = [trained[name] for name in order]
    if isinstance(groups, int):
        each, more = divmod(len(parameters), groups)
        bounds = [place * each + min(place, more) for place in range(groups + 1)]
        return [parameters[a:b] for a, b in itertools.pairwise(bounds) if b > a]
    known = {id(one) for one in parameters}
    chosen = [[one for one in group if id(one) in known] for group in groups]
    taken = {id(one) for group in chosen for one in group}
    return [group for group in chosen if group] + [[one] for one in parameters if id(one) not in taken]
