"""Checkpoints of the run on disk: this worker's part in writing them, in the background.

A save copies the state that this worker writes, and returns. One thread then writes the files, and the checkpoint is
committed once all writers' files are complete.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.checkpoint.checkpoint_dir import find
from paceline.checkpoint.retention import discard
from paceline.checkpoint.weight_files import FROZEN
from paceline.comm.group import WorkerGroup, total
from paceline.errors import CheckpointError
from paceline.events import CheckpointSaved, Event, Warned
from paceline.parallel.offload.memory import directory_of
from paceline.plan import Plan
from paceline.worker.record.run_files import RunFiles
from paceline.worker.state.background_call import poll_s
from paceline.worker.state.checkpoint_shards import CheckpointShardWriter
from paceline.worker.state.codec_state import GatheredCodecState
from paceline.worker.state.resumed_state import ResumedState
from paceline.worker.state.run_state import OBJECTS, Carrier, RunState, StateContents
from paceline.worker.state.state_registry import merge_owned_values, merge_replica_states
from paceline.worker.topology.parallel_groups import ParallelGroups

__all__ = ["CheckpointSaver"]

ABANDON_S = 3.0  # less than what a supervisor gives to a failed job
LOOK_S = 0.02


class CheckpointSaver:
    """Saves the run's state on disk: worker 0 all of it, or each worker of the first replica what it holds."""

    def __init__(
        self,
        plan: Plan,
        contents: StateContents,
        *,
        resumed: ResumedState,
        group: WorkerGroup,
        axes: ParallelGroups,
        files: RunFiles,
        store: dist.Store,
        timeout_s: float,
        states_here: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """While `states_here()` lasts, the state of all optimizers is in them."""
        self.saved_at = -1  # the step after which this worker itself has written last
        self.has_taken_over = False  # another worker may have been the first before
        self._plan, self._contents, self._resumed = plan, contents, resumed
        self._group, self._axes, self._files, self._store = group, axes, files, store
        self._timeout_s, self._poll_s = timeout_s, poll_s(timeout_s)
        self._states_here = states_here
        self._writer: CheckpointShardWriter | None = None
        self._saved_steps: set[int] = set()  # by this worker, until there is nothing else beyond where it began
        self._has_discarded = False
        self._then: tuple[int, Callable[[], None]] | None = None  # what follows the save of a step

    @property
    def writes(self) -> bool:
        """Whether this worker writes files."""
        return self._axes.writer(self._group.index) is not None

    def save(self, *, step: int, gathered: GatheredCodecState, is_writer: bool = False) -> None:
        """Copy the state and let a background thread write it; workers that do not write have nothing to do.

        `gathered`: the codec state of all replicas. `is_writer`: this worker writes, whichever is the first.
        """
        if not self.writes and not is_writer:
            return
        self.saved_at = step
        with self._states_here():
            self._write(RunState.capture(self._contents, Carrier.DISK, step=step, gathered=gathered))
        self.release()

    def save_alone(self, *, step: int, then: Callable[[], None]) -> bool:
        """Save on this worker alone, which holds all of the state, and call `then()` in the writing thread once the
        checkpoint is complete. Returns whether that is done.

        The others may be in their next collective, so this waits less than they do; what is not done goes on. Raises
        CheckpointError for a checkpoint that could not be written, and where an earlier one takes too long.
        """
        writer, is_awaited = self._opened(), self._group.size > 1
        if is_awaited and not writer.is_written(self._timeout_s / 2):
            raise CheckpointError(
                f"step {step} was not saved: the checkpoint before it is not written after {self._timeout_s / 2:.0f} s "
                "more, and the other workers wait. Save less often, or give a longer timeout_s (--timeout-s)"
            )
        self._then = step, then
        self.save(step=step, gathered=GatheredCodecState())
        if is_awaited and not writer.is_written(self._timeout_s / 4):
            return False
        writer.wait()
        return True

    def _write(self, state: RunState) -> None:
        about = {
            "step": state.step,
            "plan": str(self._plan),
            "workers": self._group.size,
            "torch": torch.__version__,
            "keep": self._files.keep,  # also of copies elsewhere
        }
        plain: dict[str, Any] = dict(state.plain)
        if self._contents.registry.whole_states:
            for group in (self._axes.shard_group, self._axes.tensor, self._axes.experts):
                plain[OBJECTS] = merge_owned_values(group.gather_objects(plain[OBJECTS]))
        owners = self._contents.registry.owners
        if owners:
            places = {name: self._axes.place_of(owner) for name, owner in owners.items()}
            plain[OBJECTS] = merge_replica_states(self._axes.parted.gather_objects(plain[OBJECTS]), places)
        left_out = self._contents.frozen.unchanged()
        if left_out:
            plain[OBJECTS] = {**plain[OBJECTS], FROZEN: left_out}
        tensors = {name: value for name, value in state.tensors.items() if name not in left_out}
        self._opened().save(state.step, tensors, state.slices, state.owners, plain, about)

    def release(self) -> None:
        """Give up copies of offloaded state: it was read, and is not needed before the next step."""
        for offloaded in self._contents.registry.offloaded.values():
            offloaded.release()

    def warm(self) -> None:
        """Once, after a step has made the optimizers' state: get the memory for saves in the background."""
        if self.writes and not self._opened().is_warm:
            registry, omittable = self._contents.registry, self._contents.frozen.omittable()
            tensors = {name: value for name, value in registry.tensors().items() if name not in omittable}
            self._opened().warm(tensors, registry.tensor_slices(), registry.tensor_owners())

    def _opened(self) -> CheckpointShardWriter:
        if self._writer is None:
            self._writer = CheckpointShardWriter(
                self._files.checkpoint_dir,
                keep=self._files.keep,
                on_event=self._saved,
                axes=self._axes,
                index=self._axes.writer(self._group.index) or 0,
                store=self._store,
                attempt=self._files.attempt,
                timeout_s=self._timeout_s,
                tidies=not self.has_taken_over,
                staging=directory_of(self._plan.compute),
            )
        return self._writer

    def _saved(self, event: Event) -> None:
        """Report it. Once this attempt has a checkpoint of its own, delete those of steps that it does not have."""
        self._files.emit(event)
        if isinstance(event, CheckpointSaved) and self._then is not None and self._then[0] == event.step:
            (_, then), self._then = self._then, None
            then()
        if not isinstance(event, CheckpointSaved) or self._has_discarded:
            return
        self._saved_steps.add(event.step)
        # A worker that took over from another one of this attempt does not know which earlier ones are its own.
        after_step = event.step if self.has_taken_over else self._resumed.step
        directory = self._files.checkpoint_dir
        try:
            discard(directory, after_step=after_step, keeping=self._saved_steps)
            self._has_discarded = True
        except OSError as error:  # tried again after the next save
            text = f"a checkpoint in {directory} that this run does not go on from could not be deleted: {error}"
            self._files.emit(Warned(text=f"{text}. The next start may take it for the newest: delete it before"))

    def wait(self, *, is_end: bool = False) -> None:
        """Return when no worker writes any more; an operation of all workers.

        A save may take longer than others may be kept waiting. So a writer waits for a moment only, then all exchange
        whether any still writes, and so on. A writer that stands still is found none the less.

        `is_end`: raises CheckpointError on writers whose last save could not be committed, before they report to the
        others that they are done: those of an elastic run save once more.
        """
        while True:
            is_written = self._writer is None or self._writer.is_written(self._poll_s)
            if is_written and is_end and self._writer is not None and self.writes:  # others reported it at the time
                self._writer.wait()
            if not total(self._group, [float(not is_written)], what="whether checkpoints are written")[0]:
                return

    def await_complete(self, step: int) -> None:
        """Wait a moment until the checkpoint of this step is complete, whichever workers write it; not together with
        them. It is looked for on disk: where that is another host's, the moment passes."""
        until = time.monotonic() + ABANDON_S
        while step > self._resumed.step and (find(self._files.checkpoint_dir).step or 0) < step:
            if time.monotonic() > until:
                return
            time.sleep(LOOK_S)

    def close(self, *, is_left: bool = False) -> None:
        """Wait for the last save; raises CheckpointError when it could not be committed.

        `is_left`: the others go on, or have waited for their own save. Then a failure, which was reported at the time,
        is no error of this worker's. Neither is one of a worker that no longer writes.
        """
        if self._writer is not None:
            with contextlib.suppress(*((CheckpointError,) if is_left or not self.writes else ())):
                self._writer.close()

    def abandon(self) -> None:
        """After an error: wait a moment for the last save; whether it succeeded is in the events."""
        if self._writer is not None:
            with contextlib.suppress(CheckpointError):
                self._writer.close(ABANDON_S)
