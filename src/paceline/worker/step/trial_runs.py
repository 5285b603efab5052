"""Runs forwards of a step once more, without gradients and without a trace, for what is found by trial.

Two micro-batches of this worker are run, or the halves of its only one. Buffers and weights that a forward writes are
put back, and random state is left as it was. Each run is seeded by its micro-batch's place, so the same one draws the
same numbers. The workers of a replica make as many forwards each, so all make a trial or none does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from paceline.comm.sharded_tensors import local_part
from paceline.parallel.fully_sharded.sharded_model import ShardedModels
from paceline.parallel.precision import computing, input_dtype
from paceline.plan import Plan
from paceline.worker.data import random_state
from paceline.worker.data.step_batch import StepBatch, to_device
from paceline.worker.step.heard_calls import HeardCall, HeardCalls
from paceline.worker.step.model_buffers import BufferAverager

__all__ = ["TrialForwards", "TrialRuns", "halves"]

HEARD = 4  # passes in which calls are listened to
LEAST = 4  # samples of a micro-batch whose halves are run: batch norm needs two


@dataclasses.dataclass(frozen=True, slots=True)
class TrialForwards:
    """Two forwards, which return what the model or the loss returned."""

    both: tuple[Callable[[], Any], Callable[[], Any]]
    are_of_one_batch: bool  # because there was no other data


Run = Callable[[TrialForwards, int], Any]


class TrialRuns:
    """The forwards of one worker's present pass that can be run once more."""

    def __init__(self, plan: Plan, buffers: BufferAverager, shards: ShardedModels, device: torch.device) -> None:
        self._plan, self._buffers, self._shards, self._device = plan, buffers, shards, device
        self._versions: list[tuple[nn.Parameter, int]] = []  # of all weights, at the step's beginning
        self._forward: Callable[[Any], Any] | None = None  # of a micro-batch; None: the script's own loop
        self._heard = HeardCalls()
        self._num_passes = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a forward runs that counts for nothing."""
        return not self._heard.is_open

    def begin(
        self, forward: Callable[[Any], Any] | None, *, owners: Iterable[nn.Module], is_surely: bool = False
    ) -> None:
        """A pass begins that may need a trial.

        `forward` runs a micro-batch. None: calls of the models are listened to, in the first passes or `is_surely`, and
        of the `owners`, modules that may be called alone.
        """
        models = self._buffers.models
        self._forward = forward
        self._versions = [(p, p._version) for model in models for p in model.parameters()]
        self._num_passes += 1
        if forward is None and (is_surely or self._num_passes <= HEARD) and not self._plan.compute.compile:
            self._heard.listen(models, owners)

    def open_micro(self) -> None:
        """The next micro-batch of a pass begins."""
        self._heard.open_micro()

    def end(self) -> None:
        """A pass has ended."""
        self._heard.end()
        self._versions, self._forward = [], None

    def forwards(self, batch: StepBatch) -> TrialForwards | None:
        """Two forwards of other data, if there are; None where nothing can be run."""
        forward = self._forward
        numbers = list(dict.fromkeys(number for number, _, _ in batch.runs()))[:2]
        if forward is not None and numbers:
            dtype = input_dtype(self._plan.compute.precision)
            data = [to_device(batch.read(number), self._device, dtype) for number in numbers]
            parts = data if len(data) == 2 else _two_of(data[0])
            return TrialForwards((lambda: forward(parts[0]), lambda: forward(parts[-1])), len(parts) == 1)
        return _repeated([some for some in self._heard.micros if some])

    def calls_of(self, owner: nn.Module) -> TrialForwards | None:
        """The calls of a module in the pass; None where none was heard."""
        return _repeated([[call] for call in self._heard.owners.get(owner, [])])

    def afresh(self, run: Run) -> Run:
        """As `run`, but each forward begins with the buffers of the step's beginning."""

        def run_afresh(forwards: TrialForwards, number: int) -> Any:
            self._buffers.undo()
            return run(forwards, number)

        return run_afresh

    @contextlib.contextmanager
    def opened(self, batch: StepBatch, *, has_graph: bool = False) -> Iterator[Run]:
        """Give a function that runs a forward and returns what it did; afterwards all is as it was.

        `has_graph`: with autograd, for forwards that use their own graph (`retain_grad`, forces by `autograd.grad`).
        """
        written = [(p, local_part(p.detach()).clone()) for p, version in self._versions if p._version != version]
        self._buffers.undo()
        self._shards.close()  # what was gathered before is out of date

        def run(forwards: TrialForwards, number: int) -> Any:
            random_state.seed_all(self._plan.batch.seed, 0, batch.step, batch.num_passes, number)
            with computing(self._plan.compute.precision, self._device), torch.set_grad_enabled(has_graph):
                return forwards.both[number]()

        try:
            with self._heard.closed(), torch.no_grad(), random_state.PreservedRandomState():
                yield run
        finally:
            self._buffers.undo()
            self._shards.close()
            with torch.no_grad():
                for parameter, value in written:
                    local_part(parameter).copy_(value)


def halves(data: Any) -> tuple[Any, Any] | None:
    """Split a micro-batch in two by the first dim of its tensors; None where they have not the same, or too few."""
    leaves, form = tree_flatten(data)
    sizes = {len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()}
    is_plain = all(isinstance(leaf, (Tensor, int, float, str, bool, type(None))) for leaf in leaves)
    if len(sizes) != 1 or not is_plain or min(sizes) < LEAST:
        return None
    middle = min(sizes) // 2
    parts = [
        [leaf[some] if isinstance(leaf, Tensor) and leaf.dim() else leaf for leaf in leaves]
        for some in (slice(middle), slice(middle, None))
    ]
    return tree_unflatten(parts[0], form), tree_unflatten(parts[1], form)


def _two_of(data: Any) -> list[Any]:
    found = halves(data)
    return [data] if found is None else [*found]


def _repeated(calls: Sequence[Sequence[HeardCall]]) -> TrialForwards | None:
    """Forwards that repeat the first and the last of these; None without any."""
    if not calls:
        return None
    chosen = calls[:2]
    return TrialForwards(
        (functools.partial(_repeat, chosen[0]), functools.partial(_repeat, chosen[-1])), len(chosen) == 1
    )


def _repeat(calls: Sequence[HeardCall]) -> list[Any]:
    return [model(*args, **kwargs) for model, args, kwargs in calls]
