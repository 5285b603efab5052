"""What happens in a run, as typed records: one JSON line each, the only way out of a worker.

Workers and the supervisor append; the console, TensorBoard, Prometheus, `paceline status` and the summary only read.
Times are seconds since the epoch (`clock.now()`), durations are seconds.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline import clock
from paceline.logs.event_summaries import cut_events, merge_events
from paceline.logs.sealed_log import LineLog, Sealing
from paceline.plain_data import LATEST, finite, fitted, read_object, text_of, whole

__all__ = [
    "AllReduceChosen",
    "CheckpointFailed",
    "CheckpointSaved",
    "CheckpointSkipped",
    "Evaluated",
    "Event",
    "EventLog",
    "EventsMerged",
    "Note",
    "Record",
    "Regrouped",
    "Reported",
    "Restarted",
    "RunFinished",
    "RunStarted",
    "ServerReplaced",
    "SpikeSeen",
    "StateKept",
    "StepDone",
    "StepsMerged",
    "StreamOpened",
    "UploadBegun",
    "UploadDone",
    "UploadFailed",
    "Warned",
    "WeightsDiffer",
    "WireJudged",
    "WorkerFailed",
    "WorkerFinished",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerLost",
    "WorkerStarted",
    "decode",
]


MOST_WORKERS = 1 << 20  # more than any run has; a table with a line for each still fits into memory
COUNTS = frozenset({"rank", "workers", "hosts"})  # fields that are at most so large, or lists of such numbers


class Event:
    """Base of all events; subclasses are frozen dataclasses registered by their class name."""

    kinds: ClassVar[dict[str, type[Event]]] = {}

    def __init_subclass__(cls) -> None:
        Event.kinds[cls.__name__] = cls


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunStarted(Event):
    """The supervisor begins an attempt (or worker 0 does, in a world that another launcher started)."""

    run_dir: str
    attempt: int
    workers: int
    hosts: int
    program: str
    launcher: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerStarted(Event):
    """A worker is in its group and about to run the user's function; `startup_s` counts from the user's command."""

    rank: int
    workers: int
    host: str
    pid: int
    device: str
    startup_s: float
    plan: str
    resumed_from_step: int  # 0: from the beginning


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepDone(Event):
    """A step was committed. `loss` is that of the whole global batch, or of `num_here` samples of it; `metrics` are
    what this worker reported."""

    step: int
    epoch: int
    num_samples: int  # real samples of the global batch
    loss: float | None
    metrics: Mapping[str, float]
    seconds: Mapping[str, float]  # data, compute (forward and backward), communication (waited for), optimizer, total;
    # and, where members came or went, recovery: dropped work, regrouping, handing the state over
    skipped: bool = False  # gradients were not finite: no worker took the step
    num_bytes_sent: int = 0  # by this worker to others
    num_wire_bytes: int = 0  # of these, gradients that went to other replicas
    num_raw_bytes: int = 0  # what all gradients of the step would have been, as they are
    num_here: int | None = None  # where replicas take steps by themselves: the samples of this one's; None: all
    noise_scale: float | None = None  # of gradients, in samples: larger batches pay up to about here; None: not known
    alone: bool = False  # no other worker took part in it: replicas take whole batches, in any order
    num_dropped: int = 0  # of `num_samples` those that came too late, and do not count
    late: bool = False  # those of this worker did
    optimizer: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])  # lr, and lr/1, ... of groups
    # of parameters with another one; grad_norm: global, before clipping, where it is finite; in fp16 also loss_scale,
    # with which it was taken, and overflows: steps of the run that were not, because gradients overflowed


@dataclasses.dataclass(frozen=True)
class StepsMerged(Event):
    """Old `StepDone` events of a worker, summed up when its file had grown. `time` is that of the last one."""

    first_step: int
    last_step: int
    num_steps: int
    since: float  # when the first of them began
    epoch: int  # of the last one
    num_samples: int  # all counts and seconds are sums
    num_dropped: int
    num_bytes_sent: int
    num_wire_bytes: int
    num_raw_bytes: int
    loss: Mapping[str, float]  # mean, least, most, first, last; of the finite ones
    num_broken: int  # of which the loss is not finite
    num_skipped: int  # beside those that kept their lines
    skipped_s: float  # that these took
    longest_s: float  # of a single one
    metrics: Mapping[str, float]  # means
    seconds: Mapping[str, float]  # as in StepDone
    alone: bool = False  # as in StepDone
    optimizer: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])  # means


@dataclasses.dataclass(frozen=True)
class EventsMerged(Event):
    """Old events of a kind that came so often that only the first and the last of them were kept."""

    kind: str  # the class
    num: int  # that were left out
    first_step: int | None  # of those that have one
    last_step: int | None
    sums: Mapping[str, float]  # of their numbers, by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamOpened(Event):
    """A loop over data begins. `last_step` is the step at which it will end, where the dataset's length is known."""

    name: str
    num_samples: int  # of an epoch; 0: not known
    epochs: int
    last_step: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reported(Event):
    """Values that `worker.report` was given between steps, by this worker."""

    step: int
    metrics: Mapping[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """`worker.evaluate` finished; the values are exact over all workers."""

    step: int
    num_samples: int
    metrics: Mapping[str, float]
    duration_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    step: int
    path: str
    num_bytes: int
    stall_s: float  # training stood still
    write_s: float  # in the background


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    step: int
    path: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadBegun(Event):
    """A checkpoint is being sent to the run's `remote_dir`, behind training."""

    step: int
    path: str  # its address
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadDone(Event):
    """A checkpoint is complete in the run's `remote_dir`."""

    step: int
    path: str
    num_bytes: int
    num_sent_bytes: int  # in this try; parts that were there from an earlier one are not sent again
    upload_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class UploadFailed(Event):
    """A checkpoint could not be sent; it is tried again, or the next one is sent in its place."""

    step: int
    path: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointSkipped(Event):
    """An incomplete or damaged checkpoint was passed over when looking for the newest one."""

    path: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateKept(Event):
    """Every worker's state after `step` was copied into memory that outlives it; said by the first worker."""

    step: int
    every: int  # steps until the next one
    seconds: float  # that training stood still for it
    num_bytes: int  # of a host's memory, for this copy and the one before
    travel_s: float = 0.0  # that the copy before took to the next host, in the background; 0: it stays on its own


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarted(Event):
    """Workers were lost, or had too little memory, and all begin again as this attempt; said by the supervisor before
    anything else happens."""

    causes: Sequence[str]  # what was lost, and how
    lost: Sequence[int]  # worker ranks
    workers: int  # that begin again
    at_step: int  # the newest that any of them had committed
    step: int  # after which they go on
    source: str  # of the state: "memory", "disk", "program": what it saves itself, or "nothing": they begin at step 1
    lost_at: float  # clock.now()
    hosts: int = 1  # that are left
    lent: Sequence[int] = ()  # workers whose state comes from a neighbor host's memory
    micro: int | None = None  # samples of a micro-batch from now on; None: as before


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskStarted(Event):
    """Another framework's program begins to run as this worker. Its steps are not known, so all its time counts alike
    once it is ready. `restarts`: how often it alone was started again in this attempt."""

    rank: int
    name: str  # what messages call it: "worker 1", "chief", "server 0"
    pid: int  # of the program
    restarts: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskReady(Event):
    """The program of a task listens at its address in the cluster: the framework is imported, and work may begin."""

    rank: int
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskUsage(Event):
    """What the program of a task uses of its host, told from time to time, and how the task stands."""

    rank: int
    name: str
    pid: int  # of the program
    up_s: float  # since it was started
    cores: float  # that it has kept busy since it was told last
    memory_bytes: int  # resident now
    restarts: int  # as in TaskStarted
    ready: bool  # TaskReady was said of it
    still_s: float = 0.0  # for which it has used no processor and written nothing; 0: for less than is worth a word
    place: str = ""  # the line at which it stands still then, "train.py:88 in step"; "": not known


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskScalars(Event):
    """Numbers that the program of the first task has written for TensorBoard, read from its event files."""

    rank: int
    name: str  # of the task
    program_step: int  # as the program counts; where it only writes numbers of epochs: how many have ended
    written: float  # when, in seconds since 1970
    epoch: int | None = None  # of which they are, from 0; None: of the step
    loss: float | None = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])  # the others, by tag


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskLost(Event):
    """The program of one task was lost. It is started again, and the others go on meanwhile."""

    rank: int
    name: str
    pid: int
    reason: str  # "worker 1 (pid 4711) killed by signal 9"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note(Event):
    """One sentence for the console that is not a warning ("resumed from step 400")."""

    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Warned(Event):
    """A warning of Paceline itself (Python warnings of the user's code are found in stderr.log)."""

    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllReduceChosen(Event):
    """`AllReduce(algorithm="auto")` has timed the algorithms among these members, before the first sum or on sums of
    the run; said by the first of them.

    Bytes are text, as keys of JSON are; "backend" is the back end's own all-reduce.
    """

    members: int
    hosts: int
    took_s: float  # 0.0 where the run's own sums were timed
    table: Mapping[str, Mapping[str, float]]  # by bytes and algorithm: seconds
    chosen: Mapping[str, str]  # by bytes: what is taken for a tensor of about this size


@dataclasses.dataclass(frozen=True, kw_only=True)
class WireJudged(Event):
    """What steps have shown of the wire; said by the first worker, and again when it is otherwise."""

    step: int
    kind: str  # costs: more than it saves; memory: the same, in shared memory; pays: `wire` would; none: any more
    wire: str = ""  # the one in use, or the one that would pay
    link_s: float = 0.0  # the network's time for a step's gradients as they are
    step_s: float = 0.0
    encoding_s: float = 0.0  # in a step
    saved_s: float = 0.0  # in a step; below 0: lost


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpikeSeen(Event):
    """A step's loss leapt, or was not finite, or its gradients were not; said by all workers alike."""

    step: int
    loss: float
    expected: float | None  # at most this; None: something is not finite
    action: str  # what the plan's guard does: stop | skip | rollback
    to_step: int | None  # of a rollback: the steps after it are undone


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatchHalved(Event):
    """A step ran out of memory, and comes again in smaller micro-batches on all workers; said by the first worker."""

    step: int
    workers: Sequence[int]  # that got no memory
    message: str  # the first one's error
    before: int  # samples of a micro-batch
    after: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightsDiffer(Event):
    """Workers whose weights are not equal to the others' to the last bit; said by all workers alike."""

    workers: Sequence[int]  # that differ; all of them where there is no majority
    who: Sequence[str]  # the same in words: worker, host, pid
    step: int
    since_step: int  # they were equal after this one
    first: str  # a tensor that differs
    source: int | None  # the worker whose state they got; None: there is no majority, and the run ends
    num_alike: int  # workers that are equal to each other


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFailed(Event):
    """Seen by the supervisor: exit status or signal, and what `error.json` says."""

    rank: int
    host: str
    step: int
    reason: str
    follows: bool = False  # only because of another one's


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerLost(Event):
    """An elastic run has lost a worker; the others go on. `step` is the newest that was committed."""

    rank: int
    host: str
    step: int
    reason: str
    silent_s: float = 0.0  # it had hung or been silent for this long


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerLeft(Event):
    """A worker of an elastic run has left between two steps, as it was to; the others go on. `step` was its last."""

    rank: int
    host: str
    step: int
    reason: str  # "SIGTERM", "resized to 2 replicas", what has come on its host
    members: Sequence[int]  # ranks of the workers that go on
    resized: bool = False  # the run was made smaller on purpose: there is no such place any more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Regrouped(Event):
    """The members that are left after a loss have formed again, and go on after `step` committed steps."""

    causes: Sequence[str]
    members: Sequence[int]  # worker ranks
    step: int
    detected_s: float  # from the loss, as far as it is known, until the last of them knew
    regrouped_s: float  # from then until all of them stood together
    steps_lost: int  # that had been committed, and have to be taken again
    holds: bool  # too few: they wait for others
    workers_each: int = 1  # of a replica


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerReplaced(Event):
    """A parameter server was lost, and its mirror has taken its place; said by the first worker that asked it."""

    server: int
    lost: str  # "parameter server 0 (pid 4711 on node1) killed by signal 9"
    by: str  # "pid 4713 on node2"
    step: int  # under way
    took_s: float  # from when the worker knew until the mirror had answered


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerJoined(Event):
    """A worker that came later has committed its first step, `after_s` after its predecessor was lost.

    `after_s` is None where it has none: the run has grown.
    """

    rank: int
    step: int
    after_s: float | None
    pid: int | None = None  # of its process; None in older records


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerFinished(Event):
    rank: int
    step: int
    peak_memory_bytes: int
    state_bytes: int = 0  # parameters, buffers and optimizer state that it held in the end; 0: not known


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFinished(Event):
    state: str  # finished | failed | stopped
    exit_code: int
    duration_s: float


@dataclasses.dataclass(frozen=True)
class Record:
    """An event, when it happened, and which worker wrote it (`worker` is None for the supervisor)."""

    time: float
    worker: int | None
    event: Event


class EventLog:
    """Appends events to one file, a line each, flushed at once: a killed process loses nothing it had said.

    With `seals` old events are summed up when the file has grown (`StepsMerged`), and leave it for a sealed file beside
    it. `worker` is None for the supervisor.
    """

    def __init__(self, path: Path, *, worker: int | None, seals: bool = True) -> None:
        self.worker = worker
        sealing = Sealing(merge=merge_events, cut=cut_events) if seals else None
        self._log = LineLog(path, sealing=sealing, say=lambda text: self.emit(Warned(text=text)))

    def emit(self, event: Event) -> None:
        fields = {"event": type(event).__name__, "time": round(clock.now(), 6), "worker": self.worker}
        fields.update(vars(event))
        self._log.write(json.dumps(_plain(fields), allow_nan=False))

    def close(self) -> None:
        self._log.close()


def decode(line: str) -> Record:
    """Read one line written by `EventLog`; raises ValueError where it is not one."""
    fields = read_object(line)
    kind = Event.kinds.get(text_of(fields.pop("event", "")))
    if kind is None:
        raise ValueError(f"not an event: {line[:80]!r}")
    if not {"time", "worker"} <= fields.keys():
        raise ValueError(f"an event without time or worker: {line[:80]!r}")
    when, worker = finite(fields.pop("time")), fields.pop("worker")
    if not 0 <= when <= LATEST:
        raise ValueError(f"an event at {when}: {line[:80]!r}")
    for name in COUNTS & fields.keys():
        value = fields[name]
        for one in value if isinstance(value, list) else (value,):
            whole(one, most=MOST_WORKERS)
    return Record(when, None if worker is None else whole(worker, most=MOST_WORKERS), fitted(kind, fields))


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they travel as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
