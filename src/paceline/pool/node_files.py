"""How a pool and the agents of its nodes talk: by two files for each node, in the pool's folder, which all of them see.

    POOL/nodes/NAME/node.json     written by the node's agent: what it offers, and how its parts of runs do
    POOL/nodes/NAME/wanted.json   written by the pool: which parts it should have
    POOL/nodes/NAME/.lock         held by the node's agent

Files, as the pool's queue and the runs lie in the same folder anyway: nothing listens, no address has to be known, and
what is wanted outlives a pool and an agent that are killed. Both files say how things should be or are, and have no
commands: an agent that missed some of them does what the newest one says. No time of a node's clock is compared with
that of another: an agent that is alive counts on (`beat`).

A *part* of a run is a `paceline run` process on one node. A run on one node has one part.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from paceline.errors import PlanError
from paceline.monitor.records.run_files import replace_text
from paceline.plain_data import fitted, read_object
from paceline.pool.cached_file import CachedFile
from paceline.private_files import make_own_directory, make_run_directory
from paceline.regular_files import read_regular

__all__ = [
    "NodeRecord",
    "PartRecord",
    "WantedPart",
    "WantedParts",
    "make_node_dir",
    "node_dir",
    "node_name",
    "node_names",
]

NODES, NODE, WANTED = "nodes", "node.json", "wanted.json"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
MOST_BYTES = 1 << 24
Kind = TypeVar("Kind")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WantedPart:
    """What a node should have of a run: `replicas` of it, or nothing any more (`leaves`).

    `start` is the random number of one start of a part: one that the node has seen end is not started again.
    `submitted`: of the run in the queue, which tells it from another one that had its name; `run_dir`: where what it
    leaves is found, also when it is not in the queue any more. The run began on `hosts`
    hosts with `workers` workers, which all of its parts say. `is_open`: parts may join it. `gpus`: the GPUs of the
    part, as CUDA_VISIBLE_DEVICES names them; None where the node has none. `fixed`: replicas of an elastic plan that
    this start is to keep; None: as the plan says. `asked`: how often it has been asked to leave, and `ends_run`: that
    means the whole run. `batch`: samples of its steps, where these may grow; 0: as the plan says. `shares`: the
    replicas that the run should have on each host, where it is resized while it goes on; empty: it is not.
    """

    start: int
    submitted: float
    replicas: int
    run_dir: str = ""
    hosts: int = 1
    workers: int = 1
    is_open: bool = False
    gpus: tuple[str, ...] | None = None
    fixed: int | None = None
    batch: int = 0
    leaves: bool = False
    ends_run: bool = False
    asked: int = 0
    shares: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(kw_only=True, slots=True)
class PartRecord:
    """A part as its node's agent knows it. `pid`: 0 while it is being started. `mark`: in its environment, by which it
    is found where the agent was killed meanwhile. `exit_code`: None while it runs, and where it is not known.
    `problem`: why it could not be started, or keeps its replicas.
    """

    start: int
    mark: str = ""
    pid: int = 0
    pid_started_s: float = 0.0
    has_ended: bool = False
    exit_code: int | None = None
    asked: int = 0
    problem: str = ""


@dataclasses.dataclass(kw_only=True, slots=True)
class NodeRecord:
    """A node: `slots` workers at the same time; with GPUs one on each of `gpus`. `host`: its name in runs' records."""

    name: str
    host: str
    slots: int
    cores: int = 1
    gpus: tuple[str, ...] | None = None
    pid: int = 0
    pid_started_s: float = 0.0
    beat: int = 0
    has_left: bool = False  # the agent has ended in good order, and so have its parts
    parts: dict[str, PartRecord] = dataclasses.field(default_factory=dict[str, PartRecord])

    @classmethod
    def load(cls, pool: Path, name: str) -> NodeRecord | None:
        """Read it; None where there is none yet, PlanError where it is damaged."""
        return _read(node_dir(pool, name) / NODE, cls)

    @classmethod
    def file(cls, pool: Path, name: str) -> CachedFile[NodeRecord | None]:
        """Return the record of a node for one that reads it often and does not change it."""
        return CachedFile(node_dir(pool, name) / NODE, lambda: cls.load(pool, name))

    def save(self, pool: Path) -> None:
        """Write it; raises OSError."""
        replace_text(node_dir(pool, self.name) / NODE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


@dataclasses.dataclass(kw_only=True, slots=True)
class WantedParts:
    """The parts that a node should have, by run."""

    parts: dict[str, WantedPart] = dataclasses.field(default_factory=dict[str, WantedPart])

    @classmethod
    def load(cls, pool: Path, name: str) -> WantedParts | None:
        """Read it; None where no pool has wanted anything yet, PlanError where it is damaged."""
        return _read(node_dir(pool, name) / WANTED, cls)

    def save(self, pool: Path, name: str) -> None:
        """Write it; raises OSError."""
        replace_text(node_dir(pool, name) / WANTED, json.dumps(dataclasses.asdict(self), indent=1) + "\n")


def node_name(host: str) -> str:
    """Return the name under which a host is a node; PlanError where its name cannot be a folder's."""
    if not NAME.fullmatch(host):
        raise PlanError(
            f"This host is named {host!r}, which cannot be a node's folder: use letters, digits, '.', '_' and '-'."
        )
    return host


def node_dir(pool: Path, name: str) -> Path:
    """Return the folder of a node."""
    return pool / NODES / name


def node_names(pool: Path) -> Iterator[str]:
    """The names of all nodes that the pool ever had."""
    for path in sorted((pool / NODES).glob("*")):
        if NAME.fullmatch(path.name):
            yield path.name


def make_node_dir(pool: Path, name: str) -> Path:
    """Make a node's folder, for this user alone; raises OSError, and PlanError where others may write to the pool's."""
    make_own_directory(pool)
    make_run_directory(pool / NODES)
    make_run_directory(node_dir(pool, name))
    return node_dir(pool, name)


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        return fitted(kind, read_object(read_regular(path, MOST_BYTES)))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PlanError(
            f"{path} cannot be read ({error}): it is damaged or of another version. Move it away."
        ) from error
