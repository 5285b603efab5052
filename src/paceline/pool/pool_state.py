"""What a pool knows of its runs beyond their own files, in `POOL/pool.json`: it outlives the pool's process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline import run_lock
from paceline.errors import PlanError
from paceline.monitor.records.run_files import replace_text
from paceline.plain_data import fitted, read_object, whole
from paceline.pool.cached_file import CachedFile
from paceline.processes import is_same_process, this_host
from paceline.regular_files import read_regular

__all__ = ["ENDED", "NodeEntry", "PartEntry", "PoolRecord", "RunEntry"]

FILE = "pool.json"
ENDED = ("finished", "failed", "stopped")


@dataclasses.dataclass(kw_only=True, slots=True)
class PartEntry:
    """What a run has on one node: `replicas`, and where there are GPUs which ones. `leaves`: it was asked to, and has
    its devices until it has ended. `asked`: how often. `start`: a random number, which no other part of any run has.
    """

    replicas: int
    start: int
    gpus: tuple[str, ...] | None = None
    leaves: bool = False
    asked: int = 0


@dataclasses.dataclass(kw_only=True, slots=True)
class NodeEntry:
    """A node as the pool sees it. `state`: here, silent (its agent does not answer), or left."""

    state: str
    slots: int
    gpus: int = 0
    used: int = 0


@dataclasses.dataclass(kw_only=True, slots=True)
class RunEntry:
    """`phase`: waiting (nothing runs), running, leaving (it saves and ends, and will wait), or one of `ENDED`.
    `submitted` and `run_dir`: of the run in the queue that this is about; another one may get its name later.

    `replicas` and their `devices`: that it has been given. `attained`: device-seconds so far. `changes`: of its
    replicas, with starts. `step_s`: measured seconds of a step, by replicas. `since`: the last change, and `let_in`:
    when it got devices after it had none, in seconds since 1970. `why`: the last decision in words. `losses`: how often
    its supervisor was lost since its last step.

    `parts`: its replicas by node, of `workers_each` workers; `starts` counts the parts that it ever had. It began on
    `hosts` hosts with `workers` workers. `is_live`: it changes its replicas while it goes on; `is_open`: parts may join
    it and leave it then. `fixed`: replicas of an elastic plan that this start keeps. `ends_run`: its parts were asked
    to end all together. `settled`: the step from which on it had the replicas that it has now, or -1 where it has not
    got them yet.

    Where the batch may grow, `step_s` is of the least one. `batch`: the present one, in samples. `samples_s`: measured
    worker-seconds of a step that grow with the batch, for the least one. `noise_scale`: what it measured last. `moves`:
    the shares with which it starts again at once, with another batch; it keeps its devices meanwhile.
    """

    phase: str = "waiting"
    submitted: float = 0.0
    run_dir: str = ""
    replicas: int = 0
    devices: int = 0
    attained: float = 0.0
    changes: int = 0
    step_s: dict[str, float] = dataclasses.field(default_factory=dict[str, float])
    batch: int = 0
    samples_s: float = 0.0
    noise_scale: float | None = None
    moves: dict[str, int] = dataclasses.field(default_factory=dict[str, int])
    since: float = 0.0
    let_in: float = 0.0
    why: str = ""
    exit_code: int | None = None
    ended: float | None = None
    step: int = 0
    last_step: int | None = None
    losses: int = 0
    parts: dict[str, PartEntry] = dataclasses.field(default_factory=dict[str, PartEntry])
    starts: int = 0
    workers_each: int = 1
    hosts: int = 1
    workers: int = 1
    is_live: bool = False
    is_open: bool = False
    fixed: int | None = None
    ends_run: bool = False
    settled: int = -1

    @property
    def shares(self) -> dict[str, int]:
        """The replicas that it has on each node, without those that leave."""
        return {node: part.replicas for node, part in self.parts.items() if not part.leaves}

    @property
    def is_over(self) -> bool:
        return self.phase in ENDED

    @property
    def measured(self) -> dict[int, float]:
        return {int(replicas): seconds for replicas, seconds in self.step_s.items()}


@dataclasses.dataclass(kw_only=True, slots=True)
class PoolRecord:
    """The pool's process, its devices, its nodes and its runs by name. `has_ended`: in good order, by its user.
    `term`: the number of this process among all that were the pool. `updated`: when this was written, by its clock.
    `taken_out`: runs that are not in the queue any more, until all of their parts have ended.
    """

    host: str = ""
    pid: int = 0
    pid_started_s: float = 0.0
    term: int = 0
    slots: int = 0
    has_ended: bool = False
    updated: float = 0.0
    nodes: dict[str, NodeEntry] = dataclasses.field(default_factory=dict[str, NodeEntry])
    runs: dict[str, RunEntry] = dataclasses.field(default_factory=dict[str, RunEntry])
    taken_out: dict[str, RunEntry] = dataclasses.field(default_factory=dict[str, RunEntry])

    @classmethod
    def load(cls, pool: Path) -> PoolRecord:
        """Read it; an empty one where the pool has not been started. Raises PlanError for a damaged file."""
        with _damage_is_told(pool):
            return fitted(cls, _read(pool))

    @staticmethod
    def term_file(pool: Path) -> CachedFile[int]:
        """Return the newest `term` alone, which is read faster; its reader raises PlanError for a damaged file."""

        def load() -> int:
            with _damage_is_told(pool):
                return whole(_read(pool).get("term", 0))

        return CachedFile(pool / FILE, load)

    @classmethod
    def file(cls, pool: Path) -> CachedFile[PoolRecord]:
        """Return the record for one that reads it often and does not change it."""
        return CachedFile(pool / FILE, lambda: cls.load(pool))

    def take_over(self, host: str, pid: int, pid_started_s: float, *, now: float) -> None:
        """Make this the record of the next process that is the pool.

        Clocks of hosts are not compared: on another host, times of runs count on from when this was written.
        """
        if self.updated and host != self.host:
            passed_s = now - self.updated
            for entry in self.runs.values():
                entry.since += passed_s if entry.since else 0.0
                entry.let_in += passed_s if entry.let_in else 0.0
        self.host, self.pid, self.pid_started_s = host, pid, pid_started_s
        self.term, self.has_ended = self.term + 1, False

    def save(self, pool: Path) -> None:
        """Write it; raises OSError."""
        replace_text(pool / FILE, self.text())

    def text(self) -> str:
        """Return it as JSON, with a line for each run."""
        fields = _fields(self)
        runs = ",\n".join(f" {json.dumps(name)}: {_json(entry)}" for name, entry in fields.pop("runs").items())
        return f'{_json(fields)[:-1]}, "runs": {{\n{runs}\n}}}}\n'

    def is_alive(self, pool: Path) -> bool:
        """Whether the pool's process is at work, by itself on this host, and on another one by the folder's lock."""
        if self.host == this_host():
            return is_same_process(self.pid, self.pid_started_s)
        return bool(self.host) and not self.has_ended and run_lock.is_held(pool)


def _read(pool: Path) -> dict[str, Any]:
    try:
        return read_object(read_regular(pool / FILE))
    except FileNotFoundError:
        return {}


@contextlib.contextmanager
def _damage_is_told(pool: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise PlanError(
            f"{pool / FILE} cannot be read ({error}): it is damaged or of another version. Move it away; the queue and "
            "the runs stay."
        ) from error


def _fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__slots__}


# Without `indent`, which has no fast encoder, and without `dataclasses.asdict`, which copies all that it finds.
_json = json.JSONEncoder(default=_fields).encode
