"""Compares what the script has done to prepared optimizers since the last step, over the workers that sum gradients.

Replicas stay equal because all take the same step with the same options. A scheduler that is given the loss of this
worker's own micro-batches, or `if loss < 1: optim.step()`, parts them for good, and no gradient shows it. So numbers
travel with each step's metadata: how often each optimizer has stepped, and a digest of its options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.group import WorkerGroup
from paceline.errors import SyncError

__all__ = ["OptimizerAgreement"]

MARKS = 16  # marks are below this: sums of their squares over workers stay exact in single precision
NAMED = 4  # options and workers that a message names
PRIME = 1_000_003

PLAIN = (int, float, bool)

Facts = dict[str, tuple[int, dict[tuple[int, str], Any]]]  # by optimizer: how often it has stepped, and its options


class OptimizerAgreement:
    """One worker's part in the comparison."""

    def __init__(self) -> None:
        self.optimizers: Mapping[str, Optimizer] = {}  # by name; those of the registry
        self._num_steps: dict[Optimizer, int] = {}  # since the last pass
        self._speaks = False  # a worker that joins has not seen what the others did since their last pass

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1

    def marks(self, *, salt: int) -> list[float]:
        """Numbers to be summed over the workers: whether this one speaks, two marks, and their squares.

        Two workers whose options differ have the same mark in one of 16 cases, with another `salt` in others.
        """
        if not self._speaks:
            return [0.0] * 5
        steps = sum(
            self._num_steps.get(one, 0) * (2 * number + 1) for number, one in enumerate(self.optimizers.values())
        )
        options = hash((salt, *(tuple(value for _, _, value in _numbers(one)) for one in self.optimizers.values())))
        of_steps, of_options = float(steps % MARKS), float(options // PRIME % MARKS)
        return [1.0, of_steps, of_steps**2, of_options, of_options**2]

    def compare(self, summed: list[float], group: WorkerGroup, *, step: int) -> None:
        """Compare the sums of all workers' marks. Raises SyncError, on all of them, where they differ."""
        speakers, *marks = summed
        if all(speakers * square == total**2 for total, square in zip(marks[::2], marks[1::2], strict=True)):
            return
        facts: list[Facts | None] = group.gather_objects(self._facts() if self._speaks else None)
        raise SyncError(_told(facts, step))

    def settled(self) -> None:
        """A pass is committed: what comes now is compared with the next one."""
        self._num_steps.clear()
        self._speaks = bool(self.optimizers)

    def _facts(self) -> Facts:
        return {
            name: (self._num_steps.get(one, 0), {(number, key): value for number, key, value in _numbers(one)})
            for name, one in self.optimizers.items()
        }


def _numbers(optimizer: Optimizer) -> Iterator[tuple[int, str, Any]]:
    """The numbers among the options, with the number of their group and their name. Their hashes are equal on all
    hosts, unlike those of text and of None."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            kind = type(value)
            if kind in PLAIN or (kind is tuple and all(type(one) in PLAIN for one in value)):
                yield number, key, value
            elif isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu":
                yield number, key, float(value)


def _told(facts: list[Facts | None], step: int) -> str:
    """What differs between which workers, in words."""
    spoken = [(worker, one) for worker, one in enumerate(facts) if one is not None]
    found = list[str]()
    for name in spoken[0][1] if spoken else ():
        each = [(worker, one[name]) for worker, one in spoken if name in one]
        if len({num_steps for _, (num_steps, _) in each}) > 1:
            counts = ", ".join(f"{num} on worker {worker}" for worker, (num, _) in each[:NAMED])
            found.append(f"{name!r} has stepped so often since the last pass: {counts}")
        for key in each[0][1][1]:
            values = [(worker, options.get(key)) for worker, (_, options) in each]
            if len({repr(value) for _, value in values}) > 1:
                group, option = key
                which = f" of parameter group {group}" if group else ""
                shown = ", ".join(f"{value!r} on worker {worker}" for worker, value in values[:NAMED])
                found.append(f"{option}{which} of {name!r} is {shown}")
    what = "; ".join(found[:NAMED]) or "their prepared optimizers are others"
    return (
        f"step {step}: the workers have treated an optimizer differently, so their weights would part for good: "
        f"{what}. The script decides by a value of this worker alone, such as the loss of its own micro-batches. "
        "Decide by what is equal on all: worker.average(x), worker.evaluate(...), or the loss that a stepper returns"
    )
