"""Reacts to loss spikes (skip the step, stop the run, or roll back) and has the weights of replicas compared.

`LossSpikeDetector` judges a step at the end of its gradient pass, before the optimizer steps, and equally on all
workers. What follows needs no communication either. Each worker has its own snapshot of the same state, and restores it
between two steps, when all of the user's code for the spike's step has run. Step numbers and the position in the data
only go forward: the steps since the snapshot are undone, and their samples are skipped, as is usual in training of
large models (PaLM, Chowdhery et al. 2022, section 5.1). The ledger records it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paceline.errors import BadNumbersError
from paceline.events import SpikeSeen, Warned
from paceline.plan import Guard
from paceline.schedule.micro_batches import MicroBatch
from paceline.schedule.sample_order import sample_indices
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import SampleOrder, StreamPosition
from paceline.worker.health.replica_comparison import ReplicaComparison
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.run_state import Carrier, RunState, StateContents
from paceline.worker.step.losses import LossSpike

__all__ = ["NumericalGuard"]

SPIKES_ALLOWED = 20  # skipped in a row: then the weights are broken, or the data have changed
NAMED_AT_MOST, SAMPLES_AT_MOST = 3, 8  # micro-batches of a step, and samples of each
NONFINITE_NAMED = 3  # steps, by each worker: where the weights are broken, all losses are
ROLLBACKS_ALLOWED = 5  # to the same snapshot

EpochPosition = tuple[int, int]  # epoch, position


class NumericalGuard:
    """Guards the numbers of one worker; all workers call its methods at the same points of the loop."""

    def __init__(
        self,
        guard: Guard,
        *,
        contents: StateContents,
        files: RunFiles,
        comparison: ReplicaComparison,
    ) -> None:
        self._guard, self._contents, self._files = guard, contents, files
        self._comparison = comparison
        self._snapshot: RunState | None = None
        self._names: tuple[Any, ...] = ()  # of the models and objects in it
        self._starts: dict[str, EpochPosition] = {}  # the position of each stream then
        self._kept_at = 0  # step of the last snapshot, or of the last rollback
        self._num_rollbacks = 0  # to this snapshot
        self._goes_back = self._is_noted = False  # after the present step; and the ledger has it
        self._compared_at = 0
        self._num_warnings = 0  # about losses or gradients that were not finite

    def spiked(self, step: int, spike: LossSpike) -> None:
        """The present step is a spike, and its gradients are dropped; raises BadNumbersError where that ends the
        run.
        """
        guard, to_step = self._guard, None
        if guard.on_spike == "rollback" and self._snapshot is not None:
            to_step = self._snapshot.step
        event = SpikeSeen(step=step, loss=spike.loss, expected=spike.limit, action=guard.on_spike, to_step=to_step)
        self._files.emit(event)
        what = f"step {step}: {spike}"
        go_on = "To go on from the newest checkpoint, start again with the same run_dir: "
        if guard.on_spike == "stop":
            raise BadNumbersError(
                f"{what}, and Guard(on_spike='stop') ends the run before the weights are changed. {go_on}with a lower "
                "learning rate, with clip_norm, or with on_spike='skip' or 'rollback'."
            )
        if guard.on_spike == "skip" and spike.in_a_row >= SPIKES_ALLOWED:
            raise BadNumbersError(
                f"{what}. That is the {spike.in_a_row}th spike in a row, so skipping steps does not help: the "
                f"weights are broken, or the data have changed. {go_on}with a lower learning rate, with "
                "on_spike='rollback', or with a larger Guard(factor=...)."
            )
        if to_step is not None and self._num_rollbacks >= ROLLBACKS_ALLOWED:
            raise BadNumbersError(
                f"{what}, after {self._num_rollbacks} rollbacks to step {to_step} with other samples each time: the "
                f"samples are not the cause. {go_on}with a lower learning rate, or with a larger Guard(factor=...)."
            )
        self._goes_back = to_step is not None

    def broken(self, batch: StepBatch, micros: Sequence[MicroBatch], order: SampleOrder | None) -> None:
        """Report which of this worker's micro-batches had a loss that is not finite, a few times per run."""
        self._num_warnings += 1
        if self._num_warnings <= NONFINITE_NAMED:
            more = "; further ones are not reported" if self._num_warnings == NONFINITE_NAMED else ""
            self._files.emit(Warned(text=nonfinite_loss_text(batch, micros, order) + more))

    def broken_gradients(self, step: int, names: Sequence[str]) -> None:
        """Report which of this worker's own gradients were not finite, though the loss was, a few times per run."""
        self._num_warnings += 1
        if self._num_warnings <= NONFINITE_NAMED:
            others = f" and of {len(names) - 1} more after it" if len(names) > 1 else ""
            more = "; further ones are not reported" if self._num_warnings == NONFINITE_NAMED else ""
            text = f"step {step}: the loss is finite, but not the gradient of {names[0]}{others}, which was made here"
            self._files.emit(Warned(text=text + more))

    def keep(self, step: int, cursors: Mapping[str, StreamPosition]) -> bool:
        """Between two steps: take a snapshot, where one is due; returns whether."""
        if self._guard.on_spike != "rollback":
            return False
        positions = {name: (cursor.epoch, cursor.position) for name, cursor in cursors.items()}
        self._starts = {**positions, **self._starts}  # with streams that were opened since
        registry = self._contents.registry
        names = (*registry.models, *registry.objects, registry.held_names())
        is_due = step - self._kept_at >= self._guard.rollback_every
        if self._snapshot is not None and not is_due and names == self._names:
            return False
        state = RunState.capture(self._contents, Carrier.ROLLBACK, step=step)
        self._snapshot = state.copied(self._contents, instead_of=self._snapshot)
        self._names, self._starts = names, positions
        self._kept_at, self._num_rollbacks = step, 0
        return True

    def settle(self, step: int, cursors: Mapping[str, StreamPosition]) -> None:
        """A step is over, with all of the user's code for it: roll back, where it was a spike."""
        self.put_back(step, cursors)
        self._goes_back = self._is_noted = False

    def put_back(self, step: int, cursors: Mapping[str, StreamPosition]) -> None:
        """Roll back where a spike was seen. A save in the middle of the user's code for the step calls it, and `settle`
        does it once more."""
        snapshot = self._snapshot
        if not self._goes_back or snapshot is None:
            return
        snapshot.roll_back(self._contents)
        if self._is_noted:
            return
        self._is_noted = True
        self._num_rollbacks += 1
        self._kept_at = step
        positions = {name: (cursor.epoch, cursor.position) for name, cursor in cursors.items()}
        skips = {name: (self._starts.get(name, now), now) for name, now in positions.items()}
        self._files.ledger.rolled_back(from_step=step, to_step=snapshot.step, skips=skips)

    def abandon(self) -> None:
        """The run ends in an error: do not roll back any more."""
        self._goes_back = False

    def compare(self, step: int, *, is_save_due: bool) -> None:
        """Between two steps: compare the weights of all workers, where that is due; always before a regular save."""
        every = self._guard.check_every
        if not every or step == self._compared_at or (step // every == self._compared_at // every and not is_save_due):
            return
        self._comparison.run(step, since_step=self._compared_at)
        self._compared_at = step

    def state_dict(self) -> dict[str, Any]:
        """The state for a newcomer, which has to roll back to the same snapshot as the others."""
        return {
            "snapshot": self._snapshot,
            "names": self._names,
            "starts": self._starts,
            "counts": (self._kept_at, self._num_rollbacks, self._compared_at),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned on another worker."""
        self._snapshot, self._names, self._starts = state["snapshot"], state["names"], state["starts"]
        self._kept_at, self._num_rollbacks, self._compared_at = state["counts"]

    def begin(self, step: int) -> None:
        """The run goes on from a checkpoint: count from its step."""
        self._kept_at = self._compared_at = step


def nonfinite_loss_text(batch: StepBatch, micros: Sequence[MicroBatch], order: SampleOrder | None) -> str:
    """Return "step 61: the loss is not finite in micro-batch 4 (samples 17, 805, ...), which ran here".

    A step's micro-batches are counted from 1; samples are indices into the dataset, where it has any.
    """
    shown = [f"micro-batch {micro.index + 1} ({_samples(batch, micro, order)})" for micro in micros[:NAMED_AT_MOST]]
    more = f" and {len(micros) - NAMED_AT_MOST} more" if len(micros) > NAMED_AT_MOST else ""
    return f"step {batch.step}: the loss is not finite in {', '.join(shown)}{more}, which ran here"


def _samples(batch: StepBatch, micro: MicroBatch, order: SampleOrder | None) -> str:
    stop = min(micro.stop, micro.start + SAMPLES_AT_MOST)
    more = ", ..." if stop < micro.stop else ""
    if order is None or not order.samples or order.weights or order.draws:
        return f"positions {micro.start} to {micro.stop - 1} of epoch {batch.epoch + 1}"
    seed, shuffle, count = order.seed, order.shuffle, order.samples
    positions = np.arange(micro.start, stop)
    found = sample_indices(seed=seed, epoch=batch.epoch, num_samples=count, positions=positions, shuffle=shuffle)
    return f"sample{'s' * (micro.num_samples > 1)} {', '.join(map(str, found.tolist()))}{more}"
