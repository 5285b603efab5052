"""Prepared objects and checkpoints: what is restored when something is prepared, and what is saved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from paceline.checkpoint.reader import Checkpoint, find, open_checkpoint
from paceline.checkpoint.retention import discard
from paceline.comm.group import WorkerGroup, total
from paceline.comm.sharded_tensors import TensorSlice
from paceline.errors import CheckpointError
from paceline.events import CheckpointSaved, CheckpointSkipped, Event, Note, Warned
from paceline.parallel.apply import send_from_first
from paceline.parallel.offload.memory import directory_of, memory_for, why_no_disk
from paceline.parallel.offload.optimizer_state import OffloadedState
from paceline.plan import Plan
from paceline.sync.local.weight_averaging import WeightAveraging
from paceline.worker.data import random_state
from paceline.worker.data.stream_position import StreamPosition
from paceline.worker.membership.consensus import Consensus
from paceline.worker.record.run_files import RunFiles
from paceline.worker.record.sample_ledger import ResumeOrigin
from paceline.worker.state.background_call import BackgroundCall, poll_s
from paceline.worker.state.checkpoint_shards import CheckpointShardWriter
from paceline.worker.state.codec_state import CodecState, GatheredCodecState, is_codec_state
from paceline.worker.state.optimizer_check import require_own_parameters, require_possible_steps
from paceline.worker.state.run_state import RunState, StatePart
from paceline.worker.state.snapshot import fill_model, fill_optimizer
from paceline.worker.state.state_dict import (
    StateRegistry,
    load_model,
    load_object,
    load_optimizer,
    merge_replica_states,
    restore_learning_rates,
)
from paceline.worker.step.loss_spikes import LossSpikeDetector
from paceline.worker.step.model_buffers import BufferAverager
from paceline.worker.topology.parallel_groups import ParallelGroups, StateOwner

__all__ = ["CheckpointedObjects"]

OUTER_OPTIMIZER = "outer_optimizer"  # under which the one between replicas is stored
ABANDON_S = 3.0  # less than what a supervisor gives to a failed job


class CheckpointedObjects:
    """Owns the registry and both ends of checkpoints. Only worker 0 opens files; all hold the plain part."""

    def __init__(
        self,
        plan: Plan,
        registry: StateRegistry,
        *,
        group: WorkerGroup,
        agreement: Consensus,
        device: torch.device,
        buffers: BufferAverager,
        losses: LossSpikeDetector,
        files: RunFiles,
        axes: ParallelGroups,
        memories: CodecState,
        store: dist.Store,
        timeout_s: float,
        states_here: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """While `states_here()` lasts, the state of all optimizers is in them."""
        self.registry = registry
        self._states_here = states_here
        self.step = 0  # of the open checkpoint, or of what another start had in memory
        self.source = ""  # the checkpoint's path
        self.is_recalled = False  # it was in memory, and may be in no checkpoint
        self.has_taken_over = False  # another worker may have been the first before
        self.saved_at = -1  # the step after which this worker itself has written last
        self._is_own = True  # it belongs to this run directory
        self._plan, self._group, self._device, self._buffers, self._files = plan, group, device, buffers, files
        self._agreement, self._losses = agreement, losses
        self._axes, self._store, self._timeout_s = axes, store, timeout_s
        self._look_s = poll_s(timeout_s)
        self._memories = memories
        self._handed: RunState | None = None  # what another worker had here, until all of it is taken over
        self._hands_own = False  # it was this very worker
        self._checkpoint: Checkpoint | None = None  # on worker 0
        self._state: dict[str, Any] | None = None  # its plain part, on all workers
        self._used: set[str] = set()
        self._between: list[str] = []  # names of the optimizers between replicas
        self._has_begun = False
        self._keeper: CheckpointShardWriter | None = None
        self._saved_steps: set[int] = set()  # by this worker, until there is nothing else beyond where it began
        self._has_discarded = False

    def model(
        self,
        model: nn.Module,
        name: str | None,
        *,
        cuts: Mapping[str, TensorSlice],
        homes: Mapping[str, StateOwner],
        tables: Collection[str] = (),
    ) -> str:
        """Register a model that has been placed, fill it, and make it equal everywhere; returns its name.

        `cuts`: what is here of its parameters that are cut. `homes`: where these differ, who has the word. `tables`:
        parameters that a newcomer need not be told, since servers have them.
        """
        self._refuse_known(model)
        full_name = self.registry.name_for("model", name)
        self.registry.models[full_name] = model
        self.registry.cuts.update((f"{full_name}.{key}", cut) for key, cut in cuts.items())
        self.registry.homes.update((f"{full_name}.{key}", home) for key, home in homes.items())
        self.registry.tables.update(f"{full_name}.{key}" for key in tables)
        self._fill_model(full_name)
        self._buffers.add(model)
        return full_name

    def is_fresh(self, model: nn.Module, name: str | None) -> bool:
        """Whether a model that is going to be prepared begins with its own weights, not with a checkpoint's."""
        self._refuse_known(model)
        full_name = self.registry.name_for("model", name)
        return self._state is None or full_name not in self._state["run"]["extra"]

    def _refuse_known(self, model: nn.Module) -> None:
        if any(model is known for known in self.registry.models.values()):
            raise ValueError(f"this {type(model).__name__} is prepared already; prepare each model once")

    def optimizer(self, optimizer: Optimizer, name: str | None) -> None:
        """Register an optimizer, and fill it."""
        require_own_parameters(optimizer, self.registry)
        require_possible_steps(optimizer, self.registry, self._plan)
        full_name = self.registry.name_for("optimizer", name)
        self.registry.optimizers[full_name] = optimizer
        if self._plan.compute.offload != "none":
            self._offload(full_name, optimizer)
        self._fill_optimizer(full_name)

    def trained(self) -> list[nn.Parameter]:
        """The parameters that the user's optimizers hold."""
        found = (one for name, one in self.registry.optimizers.items() if name not in self._between)
        return [parameter for one in found for group in one.param_groups for parameter in group["params"]]

    def agreeing(self, agreeing: Sequence[WeightAveraging]) -> None:
        """Register what replicas remember of their agreements, in place of what they had before, and fill it."""
        registry = self.registry
        known: dict[str, dict[str, Any]] = {}
        for name in self._between:
            known.update((registry.stand_ins[id(p)], held) for p, held in registry.optimizers.pop(name).state.items())
        is_first, self._between = not self._between, []
        registry.stand_ins = {id(anchor): name for one in agreeing for name, anchor in one.anchors}
        for number, one in enumerate(agreeing, 1):
            if one.optimizer is None:
                continue
            name = OUTER_OPTIMIZER if len(agreeing) == 1 else f"{OUTER_OPTIMIZER}_{number}_of_{len(agreeing)}"
            registry.optimizers[name] = one.optimizer
            self._between.append(name)
            one.optimizer.state.update({p: known[key] for key, p in one.anchors if key in known})
            if is_first and self._state is not None and name in self._state["run"]["optimizers"]:
                options = [{k: v for k, v in group.items() if k != "params"} for group in one.optimizer.param_groups]
                self._fill_optimizer(name)
                for group, of_plan in zip(one.optimizer.param_groups, options, strict=True):
                    group.update(of_plan)

    def _offload(self, name: str, optimizer: Optimizer) -> None:
        """Keep an optimizer's state where the plan says. Raises PlanError where there is no room."""
        compute = self._plan.compute
        self.registry.offloaded[name] = OffloadedState(optimizer, memory_for(compute))
        warning = why_no_disk(compute)
        if warning is not None and len(self.registry.offloaded) == 1:
            self._files.emit(Warned(text=warning))

    def other(self, thing: Any, name: str | None) -> None:
        """Register a scheduler or another stateful object, and fill it."""
        is_scheduler = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        full_name = self.registry.name_for("scheduler" if is_scheduler else "object", name)
        self.registry.objects[full_name] = thing
        self._fill_other(full_name)

    def cursor(self, stream: str) -> StreamPosition:
        """Where a stream stands."""
        saved = self._state["streams"].get(stream) if self._state else None
        return StreamPosition.from_plain(saved) if saved else StreamPosition()

    def origin(self) -> ResumeOrigin:
        """For the ledger: what goes on here."""
        if self._state is None:
            return ResumeOrigin()
        if self._is_own:
            return ResumeOrigin(step=self.step, attempt=self._state["attempt"])
        starts = {name: (saved["epoch"], saved["position"]) for name, saved in self._state["streams"].items()}
        return ResumeOrigin(step=self.step, source=self.source, starts=starts)

    def begin_training(self) -> None:
        """Once, before the first batch: put the random state back, and say what of the checkpoint nobody asked for."""
        if self._has_begun or self._state is None:
            return
        self._has_begun = True
        random_state.restore_random_state(self._state["random"])
        if "losses" in self._state:  # not in checkpoints of earlier versions
            self._losses.fill(self._state["losses"])
        self._fill_memories()
        run = self._state["run"]
        idle = sorted({*run["extra"], *run["optimizers"], *run["objects"]} - self._used)
        if not idle:
            self._handed = None
        elif self._group.index == 0:
            self._files.emit(
                Warned(text=f"the checkpoint also holds {', '.join(idle)}, which this script did not prepare: not used")
            )

    def _fill_memories(self) -> None:
        """Have codecs go on with what they remembered then."""
        if self._handed is not None:
            self._memories.recall(self._handed.tensors, with_own=self._hands_own)
        elif self._memories.is_kept:
            self._together(self._memories.load)
        elif (source := self._opened()) is not None and any(map(is_codec_state, source.names)):
            text = f"the checkpoint also holds gradients that had still to be sent: {self._plan.wire!r} drops them"
            self._files.emit(Note(text=text))

    def open(self, path: str | None) -> None:
        """Open a checkpoint, by default the newest complete one; what is prepared from now on is filled from it.

        Raises CheckpointError on all workers where it is damaged.
        """
        if self._agreement.is_newcomer:
            return  # a member's state comes instead

        found: BackgroundCall[tuple[int, str, bool, dict[str, Any]] | str | None] | None = None

        def look() -> tuple[int, str, bool, dict[str, Any]] | str | None:
            """Worker 0 reads all of a checkpoint to verify it; meanwhile it tells the others that it is at it."""
            nonlocal found
            about: tuple[int, str, bool, dict[str, Any]] | str | None = None
            is_known = False
            while not is_known:
                if self._group.index == 0:
                    found = found or BackgroundCall(lambda: self._look(path), name="paceline-look")
                    is_known = found.is_done(self._look_s)
                    about = found.result() if is_known else None
                is_known, about = self._group.broadcast_object((is_known, about))
            return about

        about = self._agreement.run(look)
        if isinstance(about, str):
            raise CheckpointError(about)
        if about is None:
            return
        self.step, self.source, self._is_own, self._state = about
        self._used, self._has_begun = set(), False

    def _look(self, path: str | None) -> tuple[int, str, bool, dict[str, Any]] | str | None:
        """Worker 0, in a thread: open it, once its files are as they were written; returns what all are to know of it,
        or why it cannot be used. None: there is none."""
        try:
            chosen = Path(path) if path else self._newest()
            if chosen is None:
                return None
            self._checkpoint = open_checkpoint(chosen, verified=bool(path))  # the newest has been
        except CheckpointError as error:
            return str(error)
        is_own = chosen.resolve().parent == self._files.checkpoint_dir.resolve()
        return self._checkpoint.step, str(chosen), is_own, self._checkpoint.state

    def refill(self) -> None:
        """Fill everything that is prepared already from the open checkpoint."""
        if self._state is None:
            return
        for name in self.registry.models:
            self._fill_model(name)
        for name in self.registry.optimizers:
            self._fill_optimizer(name)
        for name in self.registry.objects:
            self._fill_other(name)

    def save(
        self, *, step: int, cursors: Mapping[str, StreamPosition], gathered: GatheredCodecState, is_writer: bool = False
    ) -> None:
        """Stage the state and let a background thread write it: worker 0's, or, of sharded replicas, those of the first
        replica's workers; the others have nothing to do. `gathered`: what is saved beside the registry. `is_writer`:
        this worker writes, whoever is the first."""
        if not self.writes and not is_writer:
            return
        self.saved_at = step
        with self._states_here():
            self._keep(step, cursors, gathered)
        self.release()

    def _keep(self, step: int, cursors: Mapping[str, StreamPosition], gathered: GatheredCodecState) -> None:
        """Stage the state; all of it is here."""
        state = self._plain(cursors)
        about = {"step": step, "plan": str(self._plan), "workers": self._group.size, "torch": torch.__version__}
        registry = self.registry
        if registry.homes:
            places = {name: self._axes.place_of(home) for name, home in registry.homes.items()}
            state["run"] = merge_replica_states(self._axes.parted.gather_objects(state["run"]), places)
        self._opened_keeper().save(
            step,
            {**registry.tensors(), **gathered.tensors},
            {**registry.tensor_cuts(), **gathered.cuts},
            {**registry.tensor_homes(), **gathered.homes},
            state,
            about,
        )

    def release(self) -> None:
        """Everything was read that lies elsewhere, and is not needed before the next step."""
        for offloaded in self.registry.offloaded.values():
            offloaded.release()

    def _plain(self, cursors: Mapping[str, StreamPosition]) -> dict[str, Any]:
        streams = dict(self._state["streams"]) if self._state else {}
        streams.update({name: cursor.plain() for name, cursor in cursors.items()})
        return {
            "run": self.registry.plain(),
            "random": random_state.capture_random_state(),
            "losses": self._losses.plain(),
            "streams": streams,
            "attempt": self._files.attempt,
        }

    def warm(self) -> None:
        """Once, after a step has made the optimizers' state: get the memory for saves in the background."""
        if self.writes and not self._opened_keeper().is_warm:
            registry = self.registry
            self._opened_keeper().warm(registry.tensors(), registry.tensor_cuts(), registry.tensor_homes())

    @property
    def writes(self) -> bool:
        """Whether this worker writes files."""
        return self._axes.writer(self._group.index) is not None

    def _opened_keeper(self) -> CheckpointShardWriter:
        if self._keeper is None:
            self._keeper = CheckpointShardWriter(
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
        return self._keeper

    def _saved(self, event: Event) -> None:
        """Tell it; once this attempt has a checkpoint of its own, delete those of a future that it does not have."""
        self._files.emit(event)
        if not isinstance(event, CheckpointSaved) or self._has_discarded:
            return
        self._saved_steps.add(event.step)
        # Who took over from another worker of this attempt does not know which earlier ones are its own.
        after_step = event.step if self.has_taken_over else self.step
        directory = self._files.checkpoint_dir
        try:
            discard(directory, after_step=after_step, keeping=self._saved_steps)
            self._has_discarded = True
        except OSError as error:  # tried again after the next save
            text = f"a checkpoint in {directory} that this run does not go on from could not be deleted: {error}"
            self._files.emit(Warned(text=f"{text}. The next start may take it for the newest: delete it before"))

    def wait(self, *, is_end: bool = False) -> None:
        """Return when no worker writes any more; an operation of all workers.

        Who writes waits for a moment only, then all ask each other who is not done, and so on: a save may take longer
        than a worker may be waited for, and one that stands still is found none the less. `is_end`: raises
        CheckpointError on those whose last save could not be committed, before they have told the others that they are
        done: those of an elastic run save once more.
        """
        while True:
            is_written = self._keeper is None or self._keeper.is_written(self._look_s)
            if is_written and is_end and self._keeper is not None and self.writes:  # others told it when it happened
                self._keeper.wait()
            if not total(self._group, [float(not is_written)], what="whether checkpoints are written")[0]:
                return

    def close(self, *, is_left: bool = False) -> None:
        """Wait for the last save; raises CheckpointError when it could not be committed.

        `is_left`: the others go on, or have waited for their own save; so a failure, which was told when it happened,
        is no error of this worker's. Neither is one of a worker that no longer writes.
        """
        if self._keeper is not None:
            with contextlib.suppress(*((CheckpointError,) if is_left or not self.writes else ())):
                self._keeper.close()

    def abandon(self) -> None:
        """After an error: wait a moment for the last save; whether it succeeded is in the events."""
        if self._keeper is not None:
            with contextlib.suppress(CheckpointError):
                self._keeper.close(ABANDON_S)

    def _newest(self) -> Path | None:
        found = find(self._files.checkpoint_dir, verified=True)
        for path, reason in found.skipped:
            self._files.emit(CheckpointSkipped(path=str(path), reason=reason))
        # What was being written when a run was killed is no loss; a checkpoint that was complete once is one.
        damaged = [path for path, _ in found.skipped if ".partial" not in path.name]
        if found.newest is None and damaged:
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {self._files.checkpoint_dir} can be read "
                f"({found.skipped[-1][1]}), so "
                "nothing is continued. Mend them, or start over with fresh=True (--fresh)"
            )
        return found.newest

    def _together(self, fill: Callable[[Checkpoint | None, WorkerGroup], None]) -> None:
        """Fill something on all workers, from worker 0's checkpoint."""
        self._agreement.run(lambda: fill(self._opened(), self._group))

    def _opened(self) -> Checkpoint | None:
        """The open checkpoint, on worker 0; it may be another worker than the one that opened it."""
        if self._group.index == 0 and self._checkpoint is None and self.source:
            self._checkpoint = open_checkpoint(Path(self.source), verified=True)
        return self._checkpoint if self._group.index == 0 else None

    def capture(
        self,
        *,
        step: int,
        cursors: Mapping[str, StreamPosition],
        parts: Mapping[str, StatePart],
        worker: int | None = None,
    ) -> RunState:
        """Return this worker's whole state, live, for a worker at the same place of a replica.

        It is what a checkpoint holds of it, and buffers that a checkpoint leaves out. `worker`: the rank that may begin
        again with it; only then does it hold what this replica's codecs have still to send.
        """
        return RunState.capture(
            self.registry,
            step=step,
            plain=self._plain(cursors),
            codec_tensors=self._memories.here(with_own=worker is not None),
            parts=parts,
            worker=worker,
        )

    def recall(self, state: RunState, *, is_own: bool) -> None:
        """Go on with what a worker at this place had when the run's workers were lost: what is prepared from now on is
        filled from it. `is_own`: it was this very worker, and not the one at the same place of another replica."""
        self._take_over(state)
        self.is_recalled, self._hands_own = True, is_own

    def fill(self, state: RunState) -> None:
        """Take over another worker's state, for what is prepared already and for what will be."""
        self._take_over(state)
        self._has_begun, self.has_taken_over, self._hands_own = False, True, False
        self.refill()

    def _take_over(self, state: RunState) -> None:
        self._handed, self._state, self.step = state, dict(state.plain), state.step

    def _fill_model(self, name: str) -> None:
        model = self.registry.models[name]
        if self._agreement.is_newcomer and self._handed is None:
            return
        if self._state is None or name not in self._state["run"]["extra"]:
            if not self._axes.is_split:  # there it was done before the model was
                self._agreement.run(lambda: send_from_first([*model.parameters(), *model.buffers()], self._group))
            if self._state is not None and self._group.index == 0:
                self._files.emit(Warned(text=f"the checkpoint has no model {name!r}: it starts from its own weights"))
            return
        self._used.add(name)
        plain, registry = self._state["run"], self.registry
        if self._handed is not None:
            fill_model(name, registry, self._handed.tensors, plain)
            return
        self._together(
            lambda source, group: load_model(
                name, model, plain, source, group, registry.cuts, registry.homes, device=registry.device
            )
        )

    def _fill_optimizer(self, name: str) -> None:
        if self._state is not None:
            self._used.add(name)
            plain, optimizer = self._state["run"], self.registry.optimizers[name]
            if self._handed is not None:
                fill_optimizer(name, self.registry, self._handed.tensors, plain, self._handed.spreads)
                return
            self._together(lambda source, group: load_optimizer(name, optimizer, self.registry, plain, source, group))

    def _fill_other(self, name: str) -> None:
        if self._state is not None:
            self._used.add(name)
            load_object(name, self.registry.objects[name], self._state["run"])
            restore_learning_rates(self.registry.optimizers, self._state["run"]["optimizers"])
