"""What a step's micro-batches do to module buffers, in a plain torch loop.

Each micro-batch of a step begins with the buffers of the step's beginning. What the step leaves in them is found by a
second forward of the same micro-batches, one after another, in which nothing is put back: the counters, queues and
caches of a loop without Paceline. Running statistics are the exception. They move once per step, by the mean over the
step's samples, so that they do not depend on how many micro-batches a step has. A buffer counts as one in torch's norm
modules, where `prepare(buffers=...)` says "mean", or where it moves as such an average does. For micro-batches a and b,
which began at x, that is: b after a, less b alone, is the same fraction of (a - x) in all elements.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]  # the class that all batch norms share has no other name

__all__ = ["BareBuffers"]

Values = dict[str, Tensor | None]
NOISE = 1e-3  # of the largest change: rounding of a running statistic


class BareBuffers:
    """The buffers of all models, and their values within a step."""

    def __init__(self) -> None:
        self._models: dict[str, nn.Module] = {}
        self._means: list[str] = []  # patterns of names that are averaged because the script says so
        self._start: Values = {}
        self._weights: list[tuple[nn.Parameter, Tensor]] = []  # at the step's beginning
        self._alone: list[tuple[int, Values]] = []  # of each micro-batch that began at the step's beginning: samples
        self._in_turn: list[Values] = []  # after each micro-batch, where nothing was put back

    def add(self, name: str, model: nn.Module, rules: Mapping[str, str]) -> None:
        """Follow a model's buffers; `rules` is what `prepare(buffers=...)` was given."""
        self._models[name] = model
        self._means += [f"{name}.{pattern}" for pattern, rule in rules.items() if rule == "mean"]

    def begin(self) -> None:
        """A step begins."""
        self._start, self._alone, self._in_turn = self._values(), [], []
        self._weights = self._parameters()

    def rewind(self) -> None:
        """Put back the values of the step's beginning."""
        self._set(self._start)

    def note_alone(self, num_samples: int) -> None:
        """A micro-batch that began with the step's buffers has run."""
        self._alone.append((num_samples, self._values()))

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Meanwhile the micro-batches run once more; at the end the buffers have what the step makes of them. Weights
        that a forward changes begin as the step began, and are afterwards as they were before."""
        weights = self._parameters()
        self.rewind()
        _put(self._weights)
        yield
        _put(weights)
        self._settle()

    def note_in_turn(self) -> None:
        """The next micro-batch has run, on what the one before has left."""
        self._in_turn.append(self._values())

    def _settle(self) -> None:
        final: Values = self._in_turn[-1] if self._in_turn else dict(self._start)
        for name in list(final):
            if self._is_running_mean(name):
                final[name] = self._mean(name)
        self._set(final)

    def _is_running_mean(self, name: str) -> bool:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in self._means):
            return True
        owner, key = self._owner(name)
        if isinstance(owner, _NormBase):
            return key in ("running_mean", "running_var", "num_batches_tracked")
        return len(self._alone) > 1 and self._moves_as_average(name)

    def _moves_as_average(self, name: str) -> bool:
        first, second, after = self._alone[0][1].get(name), self._alone[1][1].get(name), self._in_turn[1].get(name)
        start = self._start.get(name)
        tensors = [value for value in (start, first, second, after) if value is not None]
        if len(tensors) < 4 or not tensors[0].is_floating_point() or len({value.shape for value in tensors}) > 1:
            return False
        x, a, b, ab = (value.double().reshape(-1) for value in tensors)
        moved, rest = a - x, ab - b
        size = float(moved.abs().max()) if moved.numel() else 0.0
        if size == 0.0:
            return False
        kept = float((rest @ moved) / (moved @ moved))
        slack = NOISE * size + 8 * torch.finfo(tensors[0].dtype).eps * float(ab.abs().max())
        return 0.0 < kept < 1.0 - 1e-6 and float((rest - kept * moved).abs().max()) <= slack

    def _mean(self, name: str) -> Tensor | None:
        parts = [(count, values[name]) for count, values in self._alone]
        if any(value is None for _, value in parts):
            return parts[-1][1]
        whole = [(count, value) for count, value in parts if value is not None]
        total = sum(count for count, _ in whole)
        mean = torch.stack([value.double() * (count / total) for count, value in whole]).sum(0)
        dtype = whole[0][1].dtype
        return (mean if dtype.is_floating_point else mean.round()).to(dtype)

    def _owner(self, name: str) -> tuple[nn.Module, str]:
        model, _, rest = name.partition(".")
        path, _, key = rest.rpartition(".")
        return self._models[model].get_submodule(path), key

    def _parameters(self) -> list[tuple[nn.Parameter, Tensor]]:
        return [(p, p.detach().clone()) for model in self._models.values() for p in model.parameters()]

    def _values(self) -> Values:
        return {name: None if value is None else value.detach().clone() for name, value in self._buffers()}

    def _set(self, values: Mapping[str, Tensor | None]) -> None:
        for name, value in values.items():
            owner, key = self._owner(name)
            current = getattr(owner, key)
            if value is None or current is None or current.shape != value.shape:
                setattr(owner, key, None if value is None else value.clone())
            elif not torch.equal(current, value):
                with torch.no_grad():
                    current.copy_(value)

    def _buffers(self) -> Iterator[tuple[str, Tensor | None]]:
        for name, model in self._models.items():
            for path, module in model.named_modules():
                held: Sequence[tuple[str, Tensor | None]] = list(module._buffers.items())  # pyright: ignore[reportPrivateUsage]  # torch lists buffers that are None nowhere else
                for key, value in held:
                    yield ".".join(part for part in (name, path, key) if part), value


def _put(values: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    with torch.no_grad():
        for parameter, value in values:
            if not torch.equal(parameter, value):
                parameter.copy_(value)
