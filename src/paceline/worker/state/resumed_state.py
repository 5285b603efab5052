"""The state that a worker goes on from, whichever carrier brought it: what is prepared is filled from it.

The carrier is a checkpoint on disk, a memory checkpoint, or another worker of the run. Objects are prepared one after
the other by the user's code, so each gets its values when it comes. The rest is given back before the first batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.reader import Checkpoint, find, open_checkpoint
from paceline.comm.group import WorkerGroup
from paceline.errors import CheckpointError
from paceline.events import CheckpointSkipped, Note, Warned
from paceline.parallel.apply import send_from_first
from paceline.parallel.file_weights import without_same_files
from paceline.plan import Plan
from paceline.worker.membership.consensus import Consensus
from paceline.worker.record.run_files import RunFiles
from paceline.worker.record.sample_ledger import ResumeOrigin
from paceline.worker.state.background_call import BackgroundCall, poll_s
from paceline.worker.state.checkpoint_loading import load_object, restore_learning_rates
from paceline.worker.state.checkpoint_state import CheckpointState, SharedCheckpoint
from paceline.worker.state.frozen_weights import left_out_names
from paceline.worker.state.run_state import OBJECTS, RunState, StateContents, When
from paceline.worker.topology.parallel_groups import ParallelGroups

__all__ = ["ResumedState"]

IMPORTED = "imported"  # in the plain values of a checkpoint that `paceline import` has written

# What all workers learn of a checkpoint: step, path, whether it is of this run directory, plain values. A text is
# the reason why it cannot be used; None: there is none.
_Found = tuple[int, str, bool, dict[str, Any]] | str | None


class ResumedState:
    """Fills prepared objects from the state that the run goes on from. Only worker 0 opens files."""

    def __init__(
        self,
        contents: StateContents,
        *,
        plan: Plan,
        group: WorkerGroup,
        consensus: Consensus,
        axes: ParallelGroups,
        files: RunFiles,
        timeout_s: float,
    ) -> None:
        self.step = 0  # after which the state was captured; 0: the run begins
        self.source = ""  # the checkpoint's path
        self.is_recalled = False  # it was in memory, and may be in no checkpoint
        self._contents, self._registry = contents, contents.registry
        self._plan, self._group, self._consensus, self._axes, self._files = plan, group, consensus, axes, files
        self._poll_s = poll_s(timeout_s)
        self._state: RunState | None = None
        self._has_local_tensors = False  # the state holds what a worker at this place had
        self._was_own = False  # that was this very worker
        self._is_own_run = True  # the checkpoint belongs to this run directory
        self._opened: Checkpoint | None = None  # on worker 0, while it looks for a checkpoint
        self._used: set[str] = set()  # names of what was filled
        self._has_begun = False

    # Where the state comes from.

    def open(self, path: str | None) -> None:
        """Open a checkpoint, by default the newest complete one; what is prepared from now on is filled from it.

        Raises CheckpointError on all workers where it is damaged.
        """
        if self._consensus.is_newcomer:
            return  # a member's state comes instead

        call: BackgroundCall[_Found] | None = None

        def look() -> _Found:
            """Worker 0 reads all of a checkpoint to verify it, and reports to the others meanwhile."""
            nonlocal call
            found: _Found = None
            is_known = False
            while not is_known:
                if self._group.index == 0:
                    call = call or BackgroundCall(lambda: self._look(path), name="paceline-look")
                    is_known = call.is_done(self._poll_s)
                    found = call.result() if is_known else None
                is_known, found = self._group.broadcast_object((is_known, found))
            return found

        found = self._consensus.run(look)
        if isinstance(found, str):
            raise CheckpointError(found)
        if found is None:
            return
        step, self.source, self._is_own_run, plain = found
        opened = self._opened
        shared = SharedCheckpoint(self.source, group=self._group, together=self._consensus.run, opened=opened)
        state = CheckpointState(
            step=step,
            tensors={},
            plain=plain,
            files=shared,
            frozen=self._contents.frozen,
            drops_feedback=self._say_dropped,
        )
        self._used, self._has_local_tensors = set(), False
        self._begin_with(state)

    def recall(self, state: RunState, *, is_own: bool) -> None:
        """Go on with what a worker at this place had when the run's workers were lost: what is prepared from now on is
        filled from it. `is_own`: it was this very worker, and not the one at the same place of another replica."""
        self.is_recalled, self._was_own, self._has_local_tensors = True, is_own, True
        self._begin_with(state)

    def take_over(self, state: RunState) -> None:
        """Go on with another worker's state, in what is prepared already and in what will be."""
        self._was_own, self._has_local_tensors = False, True
        self._begin_with(state, refills=True)

    def _begin_with(self, state: RunState, *, refills: bool = False) -> None:
        self._state, self.step, self._has_begun = state, state.step, False
        if refills:
            self.refill()
        state.restore(self._contents, When.ARRIVED)

    def _look(self, path: str | None) -> _Found:
        """Worker 0, in a thread: open a checkpoint, once its files are as they were written."""
        try:
            chosen = Path(path) if path else self._newest()
            if chosen is None:
                return None
            self._opened = open_checkpoint(chosen, verified=bool(path))  # the newest has been
        except CheckpointError as error:
            return str(error)
        is_own = chosen.resolve().parent == self._files.checkpoint_dir.resolve()
        return self._opened.step, str(chosen), is_own, self._opened.state

    def _newest(self) -> Path | None:
        found = find(self._files.checkpoint_dir, verified=True)
        for path, reason in found.skipped:
            self._files.emit(CheckpointSkipped(path=str(path), reason=reason))
        if found.newer:
            raise CheckpointError(
                f"{found.newer[-1]} is newer than what this Paceline reads ({dict(found.skipped)[found.newer[-1]]}). "
                "Going on from an older checkpoint would take its steps again: use that version, move the checkpoint "
                "away, or start over with fresh=True (--fresh), which leaves it where it is"
            )
        # What was being written when a run was killed is no loss; a checkpoint that was complete once is one.
        damaged = [path for path, _ in found.skipped if ".partial" not in path.name]
        if found.newest is None and damaged:
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self._files.checkpoint_dir} can be read "
                f"({found.skipped[-1][1]}), so "
                "nothing is continued. Mend them, or start over with fresh=True (--fresh)"
            )
        return found.newest

    def _say_dropped(self) -> None:
        text = f"the checkpoint also holds gradients that had still to be sent: {self._plan.wire!r} drops them"
        self._files.emit(Note(text=text))

    # What is given back, and when.

    def has_model(self, name: str) -> bool:
        """Whether the state holds a model of this name."""
        return self._state is not None and name in self._state.plain[OBJECTS]["extra"]

    def has_whole_model(self, name: str) -> bool:
        """Whether the state holds all weights of a model of this name: of frozen ones it may have digests alone."""
        return self.has_model(name) and not any(key.startswith(f"{name}.") for key in self._left_out())

    def note_frozen(self, name: str) -> None:
        """Before a registered model is filled: what of it a checkpoint may leave out is as it is now."""
        self._contents.frozen.take(name, self._left_out())

    def _left_out(self) -> Mapping[str, int | None]:
        return {} if self._state is None else left_out_names(self._state.plain[OBJECTS])

    def has_optimizer(self, name: str) -> bool:
        """Whether the state holds an optimizer of this name."""
        return self._state is not None and name in self._state.plain[OBJECTS]["optimizers"]

    def fill_model(self, name: str) -> None:
        """Fill a model that is registered; where the state lacks it, make it equal on all workers."""
        if self._consensus.is_newcomer and not self._has_local_tensors:
            return
        if self._state is not None and self.has_model(name):
            self._used.add(name)
            self._state.fill_model(name, self._registry)
            return
        model = self._registry.models[name]
        if not self._axes.is_split:  # there it was done before the model was
            tensors = [*model.parameters(), *model.buffers()]
            self._consensus.run(lambda: send_from_first(without_same_files(tensors, self._group), self._group))
        if self._state is not None and self._group.index == 0:
            self._files.emit(Warned(text=f"the checkpoint has no model {name!r}: it starts from its own weights"))

    def fill_optimizer(self, name: str) -> None:
        """Fill an optimizer that is registered. Raises CheckpointError where the state lacks it."""
        if self._state is not None and self._is_lacking(name, "optimizers"):
            return
        if self._state is not None:
            self._used.add(name)
            self._state.fill_optimizer(name, self._registry)

    def fill_object(self, name: str) -> None:
        """Fill a scheduler or another object that is registered. Raises CheckpointError where the state lacks it."""
        if self._state is not None and self._is_lacking(name, "objects"):
            return
        if self._state is not None:
            self._used.add(name)
            plain = self._state.plain[OBJECTS]
            load_object(name, self._registry.objects[name], plain)
            restore_learning_rates(self._registry.optimizers, plain["optimizers"])

    def _is_lacking(self, name: str, kind: str) -> bool:
        """Whether a state that came from another framework has nothing for an object, which then begins anew."""
        plain = {} if self._state is None else self._state.plain
        if IMPORTED not in plain or name in plain[OBJECTS][kind]:
            return False
        if self._group.index == 0:
            said = f"what was imported from {plain[IMPORTED]['source']} has no state for {name!r}: it begins anew"
            self._files.emit(Note(text=said))
        return True

    def refill(self) -> None:
        """Fill everything that is prepared already."""
        if self._state is None:
            return
        for name in self._registry.models:
            self.fill_model(name)
        for name in self._registry.optimizers:
            self.fill_optimizer(name)
        for name in self._registry.objects:
            self.fill_object(name)

    def begin_training(self) -> None:
        """Once, before the first batch: give back the rest, such as the random state, and report what of a checkpoint
        no prepared object has used."""
        if self._has_begun or self._state is None:
            return
        self._has_begun = True
        self._state.restore(self._contents, When.BEFORE_TRAINING, is_own=self._was_own)
        objects = self._state.plain[OBJECTS]
        idle = sorted({*objects["extra"], *objects["optimizers"], *objects["objects"]} - self._used)
        if not idle:
            self._release()
        elif self._group.index == 0:
            self._files.emit(
                Warned(text=f"the checkpoint also holds {', '.join(idle)}, which this script did not prepare: not used")
            )

    def _release(self) -> None:
        """Everything is filled: another worker's tensors are memory for others."""
        if self._state is not None and self._has_local_tensors:
            self._state = RunState(step=self._state.step, tensors={}, plain=self._state.plain)
            self._has_local_tensors = False

    def origin(self) -> ResumeOrigin:
        """For the sample ledger: what this run goes on from."""
        if self._state is None:
            return ResumeOrigin()
        plain = self._state.plain
        if IMPORTED in plain:  # of no attempt of a run: its samples are not known
            return ResumeOrigin(step=self.step, source=plain[IMPORTED]["source"], starts={})
        if self._is_own_run:
            return ResumeOrigin(step=self.step, attempt=plain["attempt"])
        starts = {name: (saved["epoch"], saved["position"]) for name, saved in plain["streams"].items()}
        return ResumeOrigin(step=self.step, source=self.source, starts=starts)
