"""A model's buffers on the first server: what replicas that do not wait for each other make of them, by their rules.

    rule     asynchronous updates                        with backup workers, of the shares that count
    mean     what a replica has changed is added         the mean, by samples
    sum      what a replica has added is added           what each has added, added up
    first    what the latest update has written          what the first of them has written

A replica has combined its own micro-batches already. Queues are refused before: their rows would have no order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

__all__ = ["BufferChanges", "ServedBuffers"]


class BufferChanges:
    """The workers' side: which buffers of the models a batch has changed."""

    def __init__(self, models: Sequence[Module], *, rules: Callable[[], Mapping[int, str]]) -> None:
        """`rules()` returns those that are known, by the ids of buffers."""
        self._rules = rules
        named = {id(one): (name, one) for model in models for name, one in model.named_buffers()}
        self.here = [one for _, one in named.values()]
        self._names = [name for name, _ in named.values()]
        self._before: list[Tensor] = []
        self._empty = _empty_buffers(models)

    def begin(self) -> None:
        """A batch begins."""
        self._before = [one.detach().clone() for one in self.here]

    def changed(self) -> dict[int, Tensor]:
        """Return the buffers that the current batch has changed, by number. Raises ValueError if one was None."""
        for name, module, own_name in self._empty:
            if getattr(module, own_name, None) is not None:
                raise ValueError(
                    f"buffer {name}, which began as None, was filled in a step: under ParameterServer(staleness=...) "
                    "or (drop=...) the servers keep the model's buffers, and know those that were there when the "
                    f"stepper was made. Register a tensor in {type(module).__name__}.__init__, with its shape and "
                    "first value; for a cache of each worker's own, use persistent=False"
                )
        pairs = enumerate(zip(self.here, self._before, strict=True))
        return {number: now.detach() for number, (now, before) in pairs if not torch.equal(now, before)}

    def about(self, changed: Mapping[int, Tensor]) -> dict[str, Any]:
        """Return what the server is to know of changed buffers: their numbers and rules."""
        rules = self._rules()
        return {"buffers": [*changed], "rules": [rules.get(id(self.here[number]), "mean") for number in changed]}

    def deltas(self, changed: Mapping[int, Tensor]) -> list[Tensor]:
        """Return what is sent of changed buffers with an asynchronous update."""
        rules = self.about(changed)["rules"]
        return [
            now if rule == "first" else _difference(now, self._before[number])
            for (number, now), rule in zip(changed.items(), rules, strict=True)
        ]

    def require_one_rule(self, answer: Mapping[str, Any]) -> None:
        """Raise ValueError where the server knows another rule of a buffer, from another replica."""
        if "other_rule" not in answer:
            return
        number, here, elsewhere = answer["other_rule"]
        name = self._names[number]
        raise ValueError(
            f"buffer {name}: a trial has shown the rule {here!r} on this replica, and {elsewhere!r} on another one, "
            "and each would combine it in its own way. Say it where the model is prepared: "
            f'worker.prepare(model, buffers={{"{name}": rule}}), where rule is "mean", "sum" or "first"'
        )


class ServedBuffers:
    """The first server's side: the buffers, and the rules that replicas have reported."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        self.values = [buffer.detach().clone() for buffer in buffers]
        self.changed: set[int] = set()  # numbers of those that have changed
        self._rules: dict[int, str] = {}

    def other_rule(self, header: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take over the rules that a replica reports; return an answer where another has reported another one."""
        for number, rule in zip(header["buffers"], header["rules"], strict=True):
            known = self._rules.setdefault(number, rule)
            if known != rule:
                return {"other_rule": [number, rule, known]}
        return None

    def sent(self, *, every: bool) -> dict[int, Tensor]:
        """Return copies for a worker that pulls them: all, or those that have changed."""
        numbers = range(len(self.values)) if every else sorted(self.changed)
        return {number: self.values[number].clone() for number in numbers}

    @torch.no_grad()
    def add(self, numbers: Sequence[int], rules: Sequence[str], changes: Sequence[Tensor]) -> None:
        """Add what one replica has changed by an update of its own."""
        for number, rule, change in zip(numbers, rules, changes, strict=True):
            buffer = self.values[number]
            if rule == "first":
                buffer.copy_(change)
            else:
                buffer.copy_(buffer + change > 0 if buffer.dtype == torch.bool else buffer + change)
            self.changed.add(number)

    @torch.no_grad()
    def combine(self, shares: Sequence[tuple[int, Mapping[int, Tensor]]]) -> None:
        """Combine the shares of a step, in their order: the samples of each, and the buffers that it has changed. One
        that has not changed a buffer counts with its old value."""
        changed = sorted({number for _, values in shares for number in values})
        for number in changed:
            old = self.values[number]
            each = [(num_samples, values.get(number, old)) for num_samples, values in shares]
            old.copy_(_combined(old, each, rule=self._rules.get(number, "mean")))
        self.changed.update(changed)


def _combined(old: Tensor, each: Sequence[tuple[int, Tensor]], *, rule: str) -> Tensor:
    """Return what shares make of a buffer: of each its samples, and what it has written."""
    if rule == "first":
        return each[0][1]
    is_integer = not (old.is_floating_point() or old.is_complex())
    if rule == "sum":
        if old.dtype == torch.bool:
            return torch.stack([value for _, value in each]).any(0)
        wide = torch.int64 if is_integer else _wide(old)
        start = old.to(wide)
        return start + sum(value.to(wide) - start for _, value in each)
    num_samples = sum(num for num, _ in each)
    mean = torch.zeros_like(old, dtype=_wide(old))
    for num, value in each:
        mean += value.to(mean.dtype) * (num / num_samples)
    return mean.round() if is_integer else mean


def _wide(buffer: Tensor) -> torch.dtype:
    return torch.complex128 if buffer.is_complex() else torch.float64


def _empty_buffers(models: Sequence[Module]) -> list[tuple[str, Module, str]]:
    """Return the persistent buffers of these models that are None: full name, module, and name there."""
    return [
        (f"{prefix}.{name}" if prefix else name, module, name)
        for model in models
        for prefix, module in model.named_modules()
        for name, buffer in module._buffers.items()  # pyright: ignore[reportPrivateUsage]  # torch lists them nowhere else
        if buffer is None and name not in module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]  # as above
    ]


def _difference(now: Tensor, before: Tensor) -> Tensor:
    """Return the change of a buffer; of booleans, 1 where one became true, and -1 where it became false."""
    return now.char() - before.char() if now.dtype == torch.bool else now - before
