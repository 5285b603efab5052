"""Finds in environment variables which engine started this process, and which of its workers it is.

A *world* is a set of processes that another launcher already started and numbered. Four sources describe one
(`paceline.environment` knows a fifth, our own):

    torchrun   RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT     also when set by hand
    slurm      SLURM_PROCID, SLURM_STEP_NUM_TASKS, ... of a step with two tasks or more     srun
    openmpi    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, ...                              mpirun of Open MPI
    mpi        PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS                         mpirun of MPICH, Intel MPI

Several at once are normal (srun sets PMI_*, too) as long as they agree. Where an outer source only started a launcher
on each node (srun starts torchrun), the inner one counts. Anything else is an error, which PACELINE_WORLD=<source> or
=none settles.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

from paceline.errors import LaunchError

__all__ = [
    "CHOICE",
    "NAMES",
    "NOTICE",
    "SOURCES",
    "Variables",
    "World",
    "expand_hosts",
    "expand_tasks_per_node",
    "find_world",
    "notice_signals",
]

CHOICE = "PACELINE_WORLD"
NOTICE = "PACELINE_NOTICE"  # signals that are requests to save and leave, beside SIGTERM: "USR1", "USR1,USR2", "none"
NAMES = (
    CHOICE,
    NOTICE,
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "TORCHELASTIC_RUN_ID",
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"),
    *("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"),
    *(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    *("PMIX_NAMESPACE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# What Paceline or the system uses otherwise, or what no program gets to see.
NO_NOTICE = (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGINT, signal.SIGSEGV, signal.SIGBUS)
MOST_TASKS = 1 << 20  # of a Slurm step, and nodes; more are a damaged variable
Variables: TypeAlias = Mapping[str, str]

Source: TypeAlias = Literal["paceline", "torchrun", "slurm", "openmpi", "mpi", "alone"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process's place among processes that another launcher started; `head` is worker 0's host, where known."""

    source: Source
    worker_rank: int
    workers: int
    local_rank: int
    local_workers: int
    head: str | None = None
    head_port: int | None = None
    job_id: str = ""

    @property
    def kills_soon(self) -> bool:
        """Whether the engine kills it a moment after SIGTERM: Open MPI's mpirun waits for a quarter of a second."""
        return self.source in ("openmpi", "mpi")

    def is_for_each_host(self, hosts: int) -> bool:
        """Whether it was only started to have the command of a job with so many hosts once on each of them."""
        return hosts > 1 and (self.workers, self.local_workers) == (hosts, 1)


def find_world(variables: Variables) -> World | None:
    """Return the world that these variables describe, or None; LaunchError where sources disagree or are incomplete."""
    chosen = variables.get(CHOICE, "").strip().lower()
    if chosen == "none":
        return None
    if chosen:
        if chosen not in SOURCES:
            raise LaunchError(f"{CHOICE} is {variables[CHOICE]!r}; it must be one of {', '.join(SOURCES)}, or none.")
        world = SOURCES[chosen](variables)
        if world is None:
            raise LaunchError(
                f"{CHOICE}={chosen}, but the environment has no world of {chosen}. Unset {CHOICE}, or set it to none."
            )
        return world
    found = [world for world in (find(variables) for find in SOURCES.values()) if world is not None]
    return _agreed(found, variables)


def notice_signals(variables: Variables) -> tuple[int, ...]:
    """Return the signals, beside SIGTERM, that ask workers to save and leave; LaunchError for what cannot be one.

    In a Slurm job that is SIGUSR1, which `sbatch --signal=USR1@60` sends a minute before the time is over; elsewhere
    none, unless PACELINE_NOTICE names some.
    """
    names = variables.get(NOTICE, "USR1" if "SLURM_JOB_ID" in variables else "none").upper()
    if names.strip() in ("NONE", ""):
        return ()
    found: list[int] = []
    for name in (part.strip().removeprefix("SIG") for part in names.split(",")):
        number = getattr(signal, f"SIG{name}", None)
        if not isinstance(number, signal.Signals) or number in NO_NOTICE:
            raise LaunchError(
                f"{NOTICE} is {variables[NOTICE]!r}; it must be names of signals that a program can wait for, such as "
                "'USR1' or 'USR1,USR2', or 'none'."
            )
        found.append(int(number))
    return tuple(found)


def expand_hosts(node_list: str) -> tuple[str, ...]:
    """Return the hosts of a Slurm node list: "n[1-2,05],gpu7" -> ("n1", "n2", "n05", "gpu7")."""
    hosts: list[str] = []
    wrong = f"{node_list[:200]!r} is no list of Slurm's nodes; expected something like 'n[1-2],gpu7'. {_remedy()}"
    for item in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", node_list):
        names = [""]
        for plain, ranges in re.findall(r"([^\[\]]+)|\[([^\]]*)\]", item):
            ends = [plain] if plain else [number for part in ranges.split(",") for number in _numbers(part, wrong)]
            if len(names) * len(ends) + len(hosts) > MOST_TASKS:
                raise LaunchError(wrong)
            names = [name + end for name in names for end in ends]
        hosts += names
    return tuple(hosts)


def expand_tasks_per_node(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each node of a Slurm step: "2(x2),1" -> (2, 2, 1)."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:\(x([0-9]{1,7})\))?", part.strip())
        if match is None or len(counts) + int(match[2] or 1) > MOST_TASKS:
            raise LaunchError(
                f"SLURM_STEP_TASKS_PER_NODE is {text[:200]!r}; expected something like '2(x2),1'. {_remedy()}"
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _torchrun(variables: Variables) -> World | None:
    if "RANK" not in variables and "WORLD_SIZE" not in variables:
        return None
    rank, workers = _number(variables, "RANK"), _number(variables, "WORLD_SIZE")
    head = variables.get("MASTER_ADDR")
    if "LOCAL_RANK" in variables and "LOCAL_WORLD_SIZE" in variables:
        local_rank, local_workers = _number(variables, "LOCAL_RANK"), _number(variables, "LOCAL_WORLD_SIZE")
    elif (other := _same_place(variables, rank, workers)) is not None:  # a script copied RANK from srun or mpirun
        local_rank, local_workers = other.local_rank, other.local_workers
    elif "LOCAL_RANK" not in variables and head in (None, "localhost", "127.0.0.1", "::1"):
        local_rank, local_workers = rank, workers  # set by hand for one host
    else:
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={workers} with MASTER_ADDR={head} do not say which workers share a host. "
            "Set LOCAL_RANK and LOCAL_WORLD_SIZE, too (torchrun does)."
        )
    job_id = variables.get("TORCHELASTIC_RUN_ID", "")
    return _world("torchrun", variables, rank, workers, local_rank, local_workers, job_id=job_id)


def _slurm(variables: Variables) -> World | None:
    # A batch script has SLURM_PROCID, but no step size. A step of one task (also salloc's shell) is no worker.
    if "SLURM_STEP_ID" not in variables or "SLURM_STEP_NUM_TASKS" not in variables:
        return None
    workers = _number(variables, "SLURM_STEP_NUM_TASKS")
    if workers == 1:
        return None
    node = _number(variables, "SLURM_NODEID")
    per_node = expand_tasks_per_node(variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node >= len(per_node):
        raise LaunchError(
            f"SLURM_NODEID is {node}, but SLURM_STEP_TASKS_PER_NODE has {len(per_node)} nodes only. {_remedy()}"
        )
    hosts = expand_hosts(variables.get("SLURM_STEP_NODELIST", ""))
    return _world(
        "slurm",
        variables,
        _number(variables, "SLURM_PROCID"),
        workers,
        _number(variables, "SLURM_LOCALID"),
        per_node[node],
        head=hosts[0] if hosts else None,
        job_id=f"{variables.get('SLURM_JOB_ID', '')}.{variables['SLURM_STEP_ID']}",
    )


def _openmpi(variables: Variables) -> World | None:
    if "OMPI_COMM_WORLD_RANK" not in variables:
        return None
    rank, workers, local_rank, local_workers = (
        _number(variables, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    job_id = variables.get("PMIX_NAMESPACE", "")
    return _world("openmpi", variables, rank, workers, local_rank, local_workers, job_id=job_id)


def _mpi(variables: Variables) -> World | None:
    if "PMI_RANK" not in variables or "PMI_SIZE" not in variables:
        return None
    rank, workers = _number(variables, "PMI_RANK"), _number(variables, "PMI_SIZE")
    if "MPI_LOCALRANKID" in variables:
        local_rank, local_workers = _number(variables, "MPI_LOCALRANKID"), _number(variables, "MPI_LOCALNRANKS")
    elif (other := _same_place(variables, rank, workers)) is not None:  # srun --mpi=pmi2 has its own variables for them
        local_rank, local_workers = other.local_rank, other.local_workers
    elif workers == 1:
        local_rank, local_workers = 0, 1
    else:
        raise LaunchError(
            f"PMI_RANK={rank} and PMI_SIZE={workers} do not say which workers share a host: "
            f"MPI_LOCALRANKID and MPI_LOCALNRANKS are not set. Set them, or use torchrun. {_remedy()}"
        )
    return _world("mpi", variables, rank, workers, local_rank, local_workers)


# In the order of preference when they agree.
SOURCES: dict[str, Callable[[Variables], World | None]] = {
    "torchrun": _torchrun,
    "slurm": _slurm,
    "openmpi": _openmpi,
    "mpi": _mpi,
}


def _agreed(found: list[World], variables: Variables) -> World | None:
    """Return the one world that all sources describe, after those that only started launchers are left out."""
    inner = [world for world in found if not any(_only_started(world, other, variables) for other in found)]
    if len({_place(world) for world in inner}) > 1:
        values = "".join(f"\n  {world.source}: worker {world.worker_rank} of {world.workers}" for world in inner)
        names = " or ".join(f"{CHOICE}={world.source}" for world in inner)
        raise LaunchError(
            f"The environment describes several worlds that disagree:{values}\n"
            f"Set {names} to choose one, or {CHOICE}=none to ignore them all. "
            "(A launcher that starts another one must start it once on each node.)"
        )
    return inner[0] if inner else None


def _only_started(outer: World, inner: World, variables: Variables) -> bool:
    """Whether the tasks of `outer` are not workers, but launchers on each node that started the workers of `inner`."""
    if outer.source in ("torchrun", inner.source) or _place(outer) == _place(inner):
        return False
    if inner.source == "torchrun":
        if "TORCHELASTIC_RUN_ID" not in variables:
            return False
        groups = variables.get("GROUP_WORLD_SIZE") or str(inner.workers // inner.local_workers)
        return groups == str(outer.workers)
    # mpirun starts its daemons by srun, one on each node; the workers inherit that step's variables.
    return outer.source == "slurm" and outer.local_workers == 1


def _same_place(variables: Variables, worker_rank: int, workers: int) -> World | None:
    """The world of a source that always knows which workers share a host, if it has this worker in the same place."""
    for find in (_slurm, _openmpi):
        world = find(variables)
        if world is not None and _place(world) == (worker_rank, workers):
            return world
    return None


def _place(world: World) -> tuple[int, int]:
    return world.worker_rank, world.workers


def _world(
    source: Source,
    variables: Variables,
    worker_rank: int,
    workers: int,
    local_rank: int,
    local_workers: int,
    *,
    head: str | None = None,
    job_id: str = "",
) -> World:
    """Check the numbers of one source; MASTER_ADDR and MASTER_PORT, where set, give the rendezvous address for every
    source.
    """
    if not (0 <= worker_rank < workers and 0 <= local_rank < local_workers <= workers):
        raise LaunchError(
            f"The variables of {source} do not fit together: worker {worker_rank} of {workers}, "
            f"number {local_rank} of {local_workers} on its host. {_remedy()}"
        )
    port = _number(variables, "MASTER_PORT") if variables.get("MASTER_PORT") else None
    return World(
        source=source,
        worker_rank=worker_rank,
        workers=workers,
        local_rank=local_rank,
        local_workers=local_workers,
        head=variables.get("MASTER_ADDR") or head,
        head_port=port,
        job_id=job_id,
    )


def _number(variables: Variables, name: str) -> int:
    value = variables.get(name)
    if value is None:
        raise LaunchError(f"{name} is not set, but others that need it are. Set it, or unset the others. {_remedy()}")
    if not re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        raise LaunchError(f"{name} is {value[:200]!r}; it must be a whole number from 0 up. {_remedy()}")
    return int(value)


def _remedy() -> str:
    return f"To ignore all of them, set {CHOICE}=none."


def _numbers(part: str, wrong: str) -> list[str]:
    """Slurm's "08-10" -> ["08", "09", "10"]; a single number stays as it is. LaunchError(wrong) for other text."""
    if "-" not in part:
        return [part]
    match = re.fullmatch(r"([0-9]{1,15})-([0-9]{1,15})", part)
    if match is None or not 0 <= int(match[2]) - int(match[1]) < MOST_TASKS:
        raise LaunchError(wrong)
    return [str(number).zfill(len(match[1])) for number in range(int(match[1]), int(match[2]) + 1)]
