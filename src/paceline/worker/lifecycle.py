"""How a worker begins and ends, apart from what users call: resume, end, leave, abandon. The session calls it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from paceline.comm.group import total
from paceline.comm.memory_checkpoint import SnapshotSlot
from paceline.events import Note
from paceline.plan import Plan
from paceline.worker.loop.program_steps import ProgramSteps
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.parts import WorkerParts
from paceline.worker.state.memory_checkpointing import read_state
from paceline.worker.state.run_state import RunState
from paceline.worker.topology.device import peak_memory_bytes

__all__ = ["WorkerLifecycle"]


class WorkerLifecycle:
    """The beginning and the end of one worker's part in a run."""

    def __init__(self, parts: WorkerParts, loop: TrainingLoop) -> None:
        self._parts = parts
        self._consensus, self._group = parts.place.consensus, parts.place.group
        self._loop, self._resumed, self._saver, self._files = loop, parts.resumed, parts.saver, parts.files

    @property
    def step(self) -> int:
        """How many steps are committed, over all attempts."""
        return self._loop.step

    @property
    def plan(self) -> Plan:
        """The run's plan in micro-batches of now, which may be smaller than it says."""
        return dataclasses.replace(self._parts.plan, batch=self._parts.sizes.batch)

    def resume(self, begins_with: SnapshotSlot | None) -> None:
        """Go on from a memory checkpoint, or else from the run directory's newest checkpoint, if there is one."""
        if begins_with is not None:
            state = RunState.from_dict(read_state(begins_with))
            self._resumed.recall(state, is_own=state.worker == self._parts.rank)
            self._loop.begin_at(self._resumed.step)
        elif self._files.may_resume:
            self._resumed.open(None)
            self._loop.begin_at(self._resumed.step)
        self._files.begin(None if self._consensus.is_newcomer else self._resumed.origin())
        if self.step and not self._resumed.is_recalled:  # the supervisor has reported a recall
            self._files.emit(Note(text=f"resumed from step {self.step} ({self._resumed.source})"))

    def end(self) -> None:
        """Finish the run after the user's function has returned: last checkpoint, events, files; all workers."""
        self._parts.place.recorder.begin("ending", self.step)
        self._loop.mode.end()
        self._parts.executor.shards.close()
        self._loop.step_log.leave()
        self._consensus.rejoin_group()
        if not self._consensus.is_newcomer:  # one that never came to a loop over batches has nothing to end
            self._require_trained()
            self._consensus.run(self._save_last)
        self._saver.close()
        if self._files.capture is not None:
            registry, models = self._parts.prepared.registry, self._parts.models
            self._files.capture.weights(registry.models, models.whole)
            if self._parts.servers is None:  # else optimizers run there
                self._files.capture.optimizers(
                    registry.optimizers, registry.parameter_names(), models.whole_state, models.state_keys
                )
        self._finish()

    def _require_trained(self) -> None:
        """Raise RuntimeError, on all workers, where the run was to train and no replica has changed any weight."""
        log, has_optimizer = self._loop.step_log, bool(self._parts.prepared.registry.optimizers)
        is_apart = self._parts.plan.is_local or self._parts.plan.is_asynchronous
        # Where replicas take steps by themselves, one that was lost may have been the only one that trained.
        of_lost = float(is_apart and self._consensus.generation > 0)

        def add_up() -> list[float]:
            self._group.barrier()  # a worker that is still in a step finds this one here, and not in another sum
            trained, *others = log.training_counts
            return total(self._group, [trained + of_lost, *others], what="whether the run has trained")

        log.require_trained(self._consensus.run(add_up), has_optimizer=has_optimizer)

    def _save_last(self) -> None:
        """Save the state of the end, where it is not saved yet; an operation of all workers."""
        resumed, saver, loop = self._resumed, self._saver, self._loop
        saver.wait()  # for a save before the one of the end
        # A loop that was stopped has saved, unless the worker that wrote that was lost since. Any other loop is saved
        # again where its last step was saved already: code after the loop may have changed the state.
        is_newer = resumed.is_recalled or self.step > resumed.step
        lacks = is_newer and saver.saved_at != self.step
        if loop.streams and self._files.saves_at_end and not loop.mode.has_left:
            gathered = self._parts.codec_state.gather(keeps=saver.writes)
            if lacks or not loop.between.is_stopped:
                loop.save(gathered)
        saver.wait(is_end=True)  # the last worker to end has seen all writers' messages

    def leave(self) -> None:
        """End this worker cleanly, while the run may go on without it."""
        self._loop.step_log.leave()
        self._saver.close(is_left=True)
        self._finish()

    def _finish(self) -> None:
        parts = self._parts
        if parts.servers is not None:
            parts.servers.close(others_stay=self._consensus.is_dismissed)
        held = parts.prepared.registry.num_bytes
        self._files.finish(self.step, peak_memory_bytes=peak_memory_bytes(parts.device), state_bytes=held)

    @contextlib.contextmanager
    def counting_steps(self, *, may_restart: bool) -> Iterator[None]:
        """While entered, report the steps that the program's own optimizers take. `may_restart`: after a lost worker
        all are to begin again; the program goes on from what it has saved."""
        if may_restart:
            self._consensus.allow_restart()
        with ProgramSteps(self._loop.step_log, self._parts.place.recorder).counting():
            yield

    def blames_server(self, error: BaseException) -> bool:
        """Whether an error says that a parameter server was lost: then no worker is its cause."""
        return self._parts.servers is not None and self._parts.servers.is_server_loss(error)

    def ask_for_restart(self, _: object, error: BaseException | None, __: object) -> None:
        """At the end of a run, as `__exit__`: where a lost parameter server is the error, or too little memory for a
        step, ask for a restart of all workers, which ends this one."""
        cause = self._parts.servers.cause_of(error) if self._parts.servers is not None else ""
        if cause:
            self._consensus.unserved(cause)
        micro = self._parts.executor.smaller_micro(error)
        if micro is not None:
            cause = f"worker {self._parts.rank} ran out of memory in step {self.step + 1}"
            self._saver.await_complete(self._loop.between.saved_at_step)  # this ends all workers, also those who write
            self._consensus.short_of_memory(cause, micro=micro)

    def abandon(self) -> None:
        """After an error: forget the step under way, leave the servers, and give a checkpoint that is being written a
        moment to be committed."""
        self._loop.step_log.leave()
        if self._parts.servers is not None:
            self._parts.servers.close(at_once=True)  # this process may live on, and they would with it
        self._parts.numerical_guard.abandon()
        self._saver.abandon()
