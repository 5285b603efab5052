"""How a buffer that a step's micro-batches have written is combined: the rule of each buffer, and how it is found.

    mean      the mean of what micro-batches wrote, weighted by their samples: running statistics
    sum       what each added, added up: counters
    first     what the step's first micro-batch wrote: constants, caches, updates that do not depend on the data
    gather    rows that each wrote, in the order of micro-batches: queues, with a pointer or without

Some rules are known by the module's type, others are given by `worker.prepare(buffers=...)`. All others are found by
trial, in the first step that changes the buffer. Two micro-batches A and B run alone, from the step's values x, and one
after the other. What they leave, a, b and ab, has a signature:

    first     a = b = ab
    sum       ab - b = a - x
    mean      ab - b = d (a - x) with the same 0 < d < 1 in all elements: x moves to a statistic by the fraction 1 - d
    gather    ab has the rows of a and then those of b
    first     a = b: it moves, and not by the data
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm  # pyright: ignore[reportPrivateUsage]  # see below
from torch.nn.utils.spectral_norm import SpectralNorm

__all__ = [
    "RULES",
    "BufferRule",
    "TriedBuffer",
    "contradicted_rules",
    "found_rule",
    "given_rules",
    "known_rule",
    "unknown_rule_text",
]

BufferRule: TypeAlias = Literal["mean", "sum", "first", "gather"]
RULES: tuple[BufferRule, ...] = ("mean", "sum", "first", "gather")
# The names that torch's norms use for their statistics, and others' norms after them.
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
NOISE = 1e-3  # of the largest change: rounding of a running statistic
UNSURE = 1e-5  # a fraction that is nearer to 1 than rounding lets it be seen


@dataclasses.dataclass(frozen=True, slots=True)
class TriedBuffer:
    """A buffer in a trial: at the step's beginning, after A alone, after B alone, and after A and then B."""

    start: Tensor
    first: Tensor
    second: Tensor
    both: Tensor
    is_one_batch: bool  # B is A once more, because there was no other data

    @property
    def has_changed(self) -> bool:
        """Whether the trial has written to it at all."""
        return not all(torch.equal(value, self.start) for value in (self.first, self.second, self.both))

    @property
    def values(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.start, self.first, self.second, self.both


def known_rule(module: nn.Module, name: str) -> BufferRule | None:
    """The rule that a module's type tells; None: it tells none."""
    if name in STATISTICS:
        return "mean"
    if isinstance(module, _SpectralNorm):
        return "first"
    # torch.nn.utils.spectral_norm leaves its vectors in the module itself, and nothing but this hook tells of them.
    hooks = module._forward_pre_hooks.values()  # pyright: ignore[reportPrivateUsage]  # torch lists hooks nowhere else
    if any(isinstance(hook, SpectralNorm) and name in (f"{hook.name}_u", f"{hook.name}_v") for hook in hooks):
        return "first"
    return None


def given_rules(names: list[str], given: Mapping[str, str]) -> dict[str, BufferRule]:
    """The rules that `prepare(buffers=...)` gives to buffers of these names. Raises ValueError for what fits none."""
    found: dict[str, BufferRule] = {}
    for pattern, text in given.items():
        rule: BufferRule | None = next((one for one in RULES if one == text), None)
        if rule is None:
            raise ValueError(
                f"prepare(buffers={{{pattern!r}: {text!r}}}): a rule is one of {', '.join(RULES)}. See "
                "docs/explanation/steps.md"
            )
        fitting = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise ValueError(
                f"prepare(buffers={{{pattern!r}: ...}}) fits no buffer of the model. It has: "
                f"{', '.join(names) or 'none'}"
            )
        for name in fitting:
            found[name] = rule
    return found


def found_rule(tried: TriedBuffer, *, is_persistent: bool) -> BufferRule | None:
    """The rule whose signature a trial shows; None: none but, perhaps, that of a queue."""
    start, first, second, both = tried.values
    if len({value.shape for value in tried.values}) > 1 or not tried.has_changed:
        return None
    is_float = start.is_floating_point() or start.is_complex()
    if not tried.is_one_batch and torch.equal(first, second) and torch.equal(first, both):
        return "first"
    if start.dtype is torch.bool:
        is_set = torch.equal(both, first | second) and not bool((start & ~(first & second)).any())
        return "sum" if is_set else None  # truth values that are set, and not cleared: the sum is "any"
    if not is_float:
        is_sum = torch.equal(both - second, first - start) and bool(((first != start) & (second != start)).any())
        return "sum" if is_sum and not bool((first < start).any()) else None
    moved = _fraction_kept(start, first, second, both)
    if moved is not None:
        return moved
    if not tried.is_one_batch and torch.equal(first, second):
        return "first"
    if not is_persistent and torch.equal(both, second):
        return "first"  # each forward writes all of it anew, and nothing is saved
    return None


def contradicted_rules(tried: TriedBuffer) -> frozenset[BufferRule]:
    """The rules that a buffer cannot have by this trial, though it may be too little to show which one it has."""
    start, first, second, both = tried.values
    if not tried.has_changed or len({value.shape for value in tried.values}) > 1:
        return frozenset()
    found: set[BufferRule] = set() if torch.equal(first, second) else {"first"}
    if start.dtype is torch.bool:
        adds = torch.equal(both, first | second)
    elif start.is_floating_point() or start.is_complex():
        wide = torch.complex128 if start.is_complex() else torch.float64
        x, a, b, ab = (value.to(wide) for value in tried.values)
        size = float((a - x).abs().max())
        rounding = 8 * torch.finfo(start.dtype).eps * float(torch.maximum(ab.abs().max(), x.abs().max()))
        adds = float((ab - b - (a - x)).abs().max()) <= NOISE * size + rounding
        keeps = _fraction_kept(start, first, second, both) == "mean" if size else torch.equal(both, second)
        if not keeps:
            found.add("mean")
    else:
        adds = torch.equal(both - second, first - start)
    return frozenset(found if adds else {*found, "sum"})


def _fraction_kept(start: Tensor, first: Tensor, second: Tensor, both: Tensor) -> BufferRule | None:
    """What the fraction of a change that another micro-batch leaves tells: all of it, or a part."""
    wide = [torch.view_as_real(v) if v.is_complex() else v for v in (start, first, second, both)]
    x, a, b, ab = (value.double().reshape(-1) for value in wide)
    moved, rest = a - x, ab - b
    size = float(moved.abs().max()) if moved.numel() else 0.0
    if not 0.0 < size < float("inf"):
        return None
    kept = float((rest @ moved) / (moved @ moved))
    rounding = 8 * torch.finfo(wide[0].dtype).eps * float(torch.maximum(ab.abs().max(), x.abs().max()))
    if not float((rest - kept * moved).abs().max()) <= NOISE * size + rounding:
        return None
    unsure = rounding / size
    if abs(1.0 - kept) <= max(unsure, 1e-9):
        is_shown = bool(((moved != 0) & (b != x)).any())  # a maximum looks alike where only one of them changed it
        return "sum" if is_shown and unsure < UNSURE else None
    return "mean" if max(unsure, 1e-6) < kept < 1.0 else None


def unknown_rule_text(name: str, shape: list[int], why: str) -> str:
    """What to say where no rule is known for a buffer that micro-batches have changed."""
    return (
        f"buffer {name} of shape {shape} changed in the forward of several micro-batches, and how what they wrote is "
        f"combined is not known: {why}. Say it where the model is prepared: "
        f'worker.prepare(model, buffers={{"{name}": rule}}), where rule is "mean" (running statistics), "sum" '
        '(counters), "first" (constants and caches) or "gather" (queues of rows, in the order of micro-batches). With '
        "Batch(micro=...) as large as the batch, on one worker, none is needed"
    )
