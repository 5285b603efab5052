"""The one file that touches environment variables: this process's place, the job's token, what children inherit.

A worker that we started carries its assignment in PACELINE_ASSIGNMENT, valid only in the process that PACELINE_PID
names: what a worker starts in turn (loader processes, commands) inherits the variables, but is not a worker.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import LaunchError, PlanError
from paceline.plain_data import read_object
from paceline.plan.job import Assignment, Job, assignment_from_json, assignment_to_json, head_address
from paceline.world_detection import NAMES, World, find_world
from paceline.world_detection import notice_signals as find_notice_signals

__all__ = [
    "ENGINE",
    "FAMILY",
    "FAULTS",
    "MICRO_TRIAL",
    "POOL",
    "PRELOADS",
    "RUN_DIR",
    "World",
    "assignment",
    "become_host",
    "cache_folder",
    "child_environment",
    "default_threads",
    "detect",
    "end_preloading",
    "engine",
    "engine_restart",
    "enter",
    "enter_torch_world",
    "family",
    "fault_programme",
    "for_hosts",
    "give_listener",
    "given_listener",
    "has_token",
    "is_preloading",
    "leave",
    "mark",
    "micro_batch_trial",
    "mlflow_experiment",
    "notice_signals",
    "own_names",
    "path_words",
    "pool",
    "quiet",
    "run_dir",
    "set_gloo_interface",
    "set_variables",
    "set_world_names",
    "ssh_address",
    "token",
    "trial_parameters",
    "usable_cores",
    "variables_of",
    "variables_set",
    "visible_gpus",
    "world_processes",
    "world_variables",
]

OWN_ASSIGNMENT, OWN_PID, TOKEN = "PACELINE_ASSIGNMENT", "PACELINE_PID", "PACELINE_TOKEN"
RUN_DIR = "PACELINE_RUN_DIR"  # the directory of the run that a script goes on with, whatever the script says
ENGINE = "PACELINE_ENGINE"  # that starts the hosts of this job: one console is shown for all of them
MARK = "PACELINE_MARK"  # begins the lines by which a host gives rows of its metrics to its driver
FAULTS = "PACELINE_FAULTS"  # the programme of a run that is drilled (paceline.testing): a file
PROCESSES = "PACELINE_PROCESSES"  # of the world that an Accelerate program sees, whatever the number of workers
MICRO_TRIAL = "PACELINE_MICRO_TRIAL"  # sizes of micro-batches to be measured, with steps: "8:12,16:6"
PARAMETERS = "PACELINE_PARAMETERS"  # of the trial that this run is, by name: a JSON object
CACHE = "PACELINE_CACHE"  # the folder in which this host keeps what can be made again
POOL = "PACELINE_POOL"  # the folder of the pool in which this run was queued
LISTENER = "PACELINE_LISTENER"  # process and file descriptor of the coordinator's socket
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
FAMILY = "PACELINE_FAMILY"  # marks a warm parent and all its descendants
PRELOADS = "PACELINE_PRELOADS"  # set in a warm parent until its imports are done
FIRST_PORT, NUM_PORTS = 20000, 10000
SHORTEST_TOKEN = 16  # bytes; what people type by heart is shorter
CGROUP = Path("/sys/fs/cgroup")
NCCL_DEFAULTS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch would end the process after an error or a time limit
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # and where its own watch stands still, as during an abort
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "60",  # s, instead of 30 min: torch waits for members with its lock held
}
_nccl_lock = threading.Lock()
_nccl_set: dict[str, int] = {}  # what is set here, by how many
MORE_NAMES = (
    OWN_ASSIGNMENT,
    OWN_PID,
    TOKEN,
    RUN_DIR,
    PARAMETERS,
    POOL,
    ENGINE,
    FAULTS,
    "OMP_NUM_THREADS",
    RESTARTS,
    "GLOO_SOCKET_IFNAME",
    "TORCH_CPP_LOG_LEVEL",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    *NCCL_DEFAULTS,
)


def detect() -> World | None:
    """Return the world that this process is in, or None; LaunchError where sources disagree or are incomplete."""
    own = assignment()
    if own is not None:
        return World(
            source="paceline",
            worker_rank=own.rank,
            workers=own.workers,
            local_rank=own.local_rank,
            local_workers=own.local_workers,
        )
    if OWN_PID in os.environ:  # a worker started this process; whatever world that worker is in, its child is not
        return None
    return find_world(os.environ)


def enter(assignment: Assignment) -> None:
    """Make this process the worker of `assignment`: `assignment()` and `detect()` return it, not in its children."""
    os.environ[OWN_ASSIGNMENT] = assignment_to_json(assignment)
    os.environ[OWN_PID] = str(os.getpid())


def variables_of(prefix: str) -> dict[str, str]:
    """Return the variables whose names begin so: those of another framework, for the package that stands in for it."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables for this process and what it starts: those that programs of another framework read."""
    os.environ.update(values)


@contextlib.contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables that a library reads while it does one thing for us; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def leave() -> None:
    """Undo `enter`: for a process that outlives its run, such as a notebook that was worker 0."""
    os.environ.pop(OWN_ASSIGNMENT, None)
    os.environ.pop(OWN_PID, None)


def enter_torch_world(assignment: Assignment) -> None:
    """Set what torchrun sets for its workers, as programs read it. MASTER_ADDR and MASTER_PORT stay as the user has set
    them: nothing listens there, and a program may make a TCPStore of its own there."""
    head = None if assignment.job.head in (None, "auto") else head_address(str(assignment.job.head))[0]
    name, attempt = os.path.basename(assignment.run_dir), assignment.attempt
    os.environ.update(
        RANK=str(assignment.rank),
        WORLD_SIZE=str(assignment.workers),
        LOCAL_RANK=str(assignment.local_rank),
        LOCAL_WORLD_SIZE=str(assignment.local_workers),
        GROUP_RANK=str(assignment.host_index),
        GROUP_WORLD_SIZE=str(assignment.hosts),
        ROLE_NAME="default",
        ROLE_RANK=str(assignment.rank),
        ROLE_WORLD_SIZE=str(assignment.workers),
        TORCHELASTIC_RUN_ID=name,
        TORCHELASTIC_RESTART_COUNT=str(attempt - 1),
        TORCHELASTIC_USE_AGENT_STORE="False",
    )
    os.environ.setdefault("MASTER_ADDR", head or "127.0.0.1")
    # The same on all workers, and another one in each attempt; below the ports that systems give out by themselves.
    port = FIRST_PORT + zlib.crc32(f"{assignment.run_dir} {attempt}".encode()) % NUM_PORTS
    os.environ.setdefault("MASTER_PORT", str(port))


def is_preloading() -> bool:
    """Whether this process imports what workers need, and so is no place to begin a run: a warm parent at first."""
    return PRELOADS in os.environ


def end_preloading() -> None:
    """The imports are done; workers come from this process now."""
    os.environ.pop(PRELOADS, None)


def assignment() -> Assignment | None:
    """Return the assignment of `enter`; None in every other process, also in children of a worker."""
    if os.environ.get(OWN_PID) != str(os.getpid()):
        return None
    try:
        return assignment_from_json(os.environ[OWN_ASSIGNMENT])
    except (KeyError, ValueError) as error:
        raise LaunchError(
            f"{OWN_ASSIGNMENT} is not what Paceline wrote ({error}). Unset {OWN_ASSIGNMENT} and {OWN_PID}."
        ) from error


def token(job: Job) -> bytes:
    """Return the job's token: what is in `job.token_file`, else in PACELINE_TOKEN, without surrounding blanks.

    Raises LaunchError where there is none, where it is shorter than 16 bytes, or where others can read the file.
    """
    make = "python3 -c 'import secrets; print(secrets.token_hex(32))'"
    if job.token_file is not None:
        path = Path(job.token_file)
        where, secret = str(path), _read_secret(path, make)
    else:
        where, secret = TOKEN, os.environ.get(TOKEN, "").encode().strip()
        if not secret:
            raise LaunchError(
                "The job has no token, which its hosts need to trust each other. Make one with "
                f"`(umask 077; {make} > token)`, give every host the same file, and use --token-file token "
                f"(token_file='token'), or set {TOKEN} to its content."
            )
    if len(secret) < SHORTEST_TOKEN:
        raise LaunchError(
            f"The token in {where} has {len(secret)} bytes; it needs at least {SHORTEST_TOKEN}. Make one with `{make}`."
        )
    return secret


def has_token(job: Job) -> bool:
    """Return whether the job was given a token, good or not."""
    return job.token_file is not None or bool(os.environ.get(TOKEN, "").strip())


def engine() -> str | None:
    """Return the engine to which `paceline run --on` gave the job of this host; None: somebody started it here."""
    return os.environ.get(ENGINE) or None


def for_hosts(names: Sequence[str]) -> dict[str, str]:
    """Return the variables that hosts of an engine get from here: ours but for this process's own place, and those of
    `names`: a name, or a name with its value, "A=1"."""
    private = (OWN_ASSIGNMENT, OWN_PID, TOKEN, RUN_DIR, ENGINE, MARK, FAMILY, PRELOADS)
    found = {name: value for name, value in os.environ.items() if name.startswith("PACELINE_") and name not in private}
    for each in names:
        name, equals, value = each.partition("=")
        if equals or name in os.environ:
            found[name] = value if equals else os.environ[name]
    return found


def path_words() -> list[str]:
    """Return words that go before a command of Python's on other hosts, which see the same disk: our PYTHONPATH."""
    path = os.environ.get("PYTHONPATH")
    return ["env", f"PYTHONPATH={path}"] if path else []


def become_host(variables: Mapping[str, str], *, token: str, engine: str, mark: str | None) -> None:
    """Enter what an engine's driver has told this host; `mark`: the driver wants the rows of its metrics."""
    os.environ.update(variables)
    os.environ[TOKEN], os.environ[ENGINE] = token, engine
    if mark is not None:
        os.environ[MARK] = f"{os.getpid()}:{mark}"


def mark() -> str | None:
    """Return what begins the lines for this host's driver, where it wants rows; None in every other process."""
    owner, _, found = os.environ.get(MARK, "").partition(":")
    return found if owner == str(os.getpid()) else None


def ssh_address() -> str | None:
    """Return this host's address as the client of the SSH connection, in which this process is, has reached it."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def give_listener(number: int) -> None:
    """Keep an open listening socket for the run of this process: this host is its coordinator."""
    os.environ[LISTENER] = f"{os.getpid()}:{number}"


def given_listener() -> int | None:
    """Return the number of that socket, once; None in every other process."""
    owner, _, number = os.environ.pop(LISTENER, "").partition(":")
    return int(number) if owner == str(os.getpid()) else None


def engine_restart() -> str:
    """Return how often torchrun has restarted its workers; "" under other engines."""
    return os.environ.get(RESTARTS, "")


def run_dir() -> str | None:
    """Return the directory of the run that this process's script is to go on with; None: as the script says."""
    return os.environ.get(RUN_DIR) or None


def trial_parameters() -> dict[str, Any]:
    """Return the parameters of the sweep's trial that this run is; none elsewhere. Raises PlanError for no JSON."""
    text = os.environ.get(PARAMETERS)
    try:
        return read_object(text) if text else {}
    except ValueError as error:
        raise PlanError(
            f"{PARAMETERS} is {text!r}, and {error}. A sweep sets it, as a JSON object; unset it elsewhere."
        ) from error


def cache_folder() -> Path:
    """Return the folder for what this host can make again, such as copies of weights in object storage."""
    own, common = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    return Path(own).expanduser() if own else (Path(common) if common else Path.home() / ".cache") / "paceline"


def pool() -> str | None:
    """Return the folder of the pool in which this run was queued; None: in none."""
    return os.environ.get(POOL) or None


def fault_programme() -> Path | None:
    """Return the file of the faults that are to come in this run, where it is a drill."""
    path = os.environ.get(FAULTS)
    return Path(path) if path else None


def micro_batch_trial() -> list[tuple[int, int]]:
    """Where a run is to measure several sizes of micro-batches: samples of each, and in how many steps."""
    pairs = [word.split(":") for word in os.environ.get(MICRO_TRIAL, "").split(",") if word]
    return [(int(samples), int(steps)) for samples, steps in pairs]


def world_processes() -> int | None:
    """Return how many processes a program of another framework is to see; None: as many as there are workers.

    Raises PlanError for what is no such number.
    """
    text = os.environ.get(PROCESSES, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(f"{PROCESSES} is {text!r}; it must be a number of processes, at least 1.")
    return int(text)


def mlflow_experiment() -> tuple[str | None, str | None]:
    """Return the number and the name of MLflow's experiment, as far as the user has set MLflow's own variables."""
    return os.environ.get("MLFLOW_EXPERIMENT_ID") or None, os.environ.get("MLFLOW_EXPERIMENT_NAME") or None


def notice_signals() -> tuple[int, ...]:
    """Return the signals, beside SIGTERM, that ask workers to save and leave
    (`paceline.world_detection.notice_signals`).
    """
    return find_notice_signals(os.environ)


def own_names() -> tuple[str, ...]:
    """Return the names by which an engine's other hosts know this one, where the engine tells them."""
    return tuple(os.environ[name] for name in ("SLURMD_NODENAME",) if os.environ.get(name))


def visible_gpus() -> tuple[str, ...] | None:
    """Return the GPUs to which CUDA_VISIBLE_DEVICES limits this process, by number or UUID; None: it is not set."""
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if said is None else tuple(name.strip() for name in said.split(",") if name.strip())


def child_environment(**extra: str) -> dict[str, str]:
    """Return the environment for a process that we start: ours without the token and our own place, and `extra`."""
    private = (OWN_ASSIGNMENT, OWN_PID, TOKEN, RUN_DIR, LISTENER)
    return {name: value for name, value in os.environ.items() if name not in private} | extra


def world_variables() -> dict[str, str]:
    """Return the variables that Paceline looks at and that are set, sorted by name; the token is not shown."""
    shown = {name: os.environ[name] for name in NAMES + MORE_NAMES if name in os.environ}
    if TOKEN in shown:
        shown[TOKEN] = "(set, not shown)"
    return dict(sorted(shown.items()))


def set_world_names(*, rank: int, workers: int, local_rank: int, local_workers: int) -> None:
    """Set the variables in which torchrun says which worker this process is, for programs that read them."""
    numbers = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_workers}
    os.environ.update({name: str(number) for name, number in numbers.items()})


def set_gloo_interface(name: str) -> bool:
    """Make gloo use network interface `name`, unless the user has chosen one; return whether it was set."""
    return _set_default("GLOO_SOCKET_IFNAME", name)


def look_for_devices_without_opening_them() -> None:
    """Have torch ask the driver's management library whether there is a GPU, and how many: the CUDA runtime could not
    be used after a fork then. Documented by torch for that; a value that is set stays."""
    _set_default("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@contextlib.contextmanager
def nccl_that_can_be_aborted() -> Iterator[None]:
    """Have torch leave it to this process what a lost member means, for communicators that are made within: no end of
    the process, and no long wait with a lock held. Values that are set stay. Afterwards everything is as before, so
    groups that a program makes by itself are watched by torch as always. Any number of threads may be within."""
    with _nccl_lock:
        mine = [name for name in NCCL_DEFAULTS if name in _nccl_set or name not in os.environ]
        for name in mine:
            os.environ[name] = NCCL_DEFAULTS[name]
            _nccl_set[name] = _nccl_set.get(name, 0) + 1
    try:
        yield
    finally:
        with _nccl_lock:
            for name in mine:
                _nccl_set[name] -= 1
                if _nccl_set[name] == 0:
                    del _nccl_set[name]
                    os.environ.pop(name, None)


def quiet() -> None:
    """Keep informational messages of torch's C++ parts off the workers' stderr, unless the user has chosen a level."""
    _set_default("TORCH_CPP_LOG_LEVEL", "ERROR")


def default_threads(local_workers: int) -> int:
    """Return CPU threads for each of `local_workers` workers here: OMP_NUM_THREADS, or their share of the cores.

    Counted are the cores that this process may use (its affinity and its cgroup's quota), not those of the machine.
    """
    chosen = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if chosen:
        if not chosen.isdecimal() or int(chosen) < 1:
            raise LaunchError(
                f"OMP_NUM_THREADS is {os.environ['OMP_NUM_THREADS']!r}; it must be 1 or more. Correct or unset it."
            )
        return int(chosen)
    return max(1, usable_cores() // local_workers)


def _read_secret(path: Path, make: str) -> bytes:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            secret = file.read().strip()
    except OSError as error:
        raise LaunchError(
            f"Cannot read the token file {path}: {error.strerror}. Make one with `(umask 077; {make} > {path})`."
        ) from error
    if mode & 0o077:
        raise LaunchError(
            f"The token file {path} can be read by others (mode {mode:04o}). Use `chmod 600 {path}`, "
            f"or put the token into {TOKEN} where the mode cannot be changed."
        )
    return secret


def _set_default(name: str, value: str) -> bool:
    if name in os.environ:
        return False
    os.environ[name] = value
    return True


def usable_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota_cores(CGROUP)
    return cores if quota is None else max(1, min(cores, quota))


def _quota_cores(cgroup: Path) -> int | None:
    """Whole cores that a container's quota allows, rounded up; None without a quota (cgroup v2, then v1)."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((cgroup / name).read_text() for name in files).split()[:2]
        except (OSError, ValueError):  # no such controller here, or a format that we do not know: no quota is known
            continue
        if quota.isdecimal() and period.isdecimal() and int(period):
            return -(-int(quota) // int(period))
    return None


def family() -> str | None:
    """Return the mark of the warm parent that this process is, or descends from."""
    return os.environ.get(FAMILY)
