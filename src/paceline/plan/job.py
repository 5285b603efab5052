"""A Job is everything about a run that cannot change its numbers; an Assignment is what one worker of it receives.

A job file is a Job in TOML, and may hold its plan: as one line of text or as tables.

    program = "train.py"            # relative to this file's folder; other paths to where the command runs
    workers = 4
    plan = "replicas=4+batch(size=64)"
    engine = "slurm(partition=gpu)"   # or a table; without it the job runs where the command is given

or, instead of the last line,

    [plan]
    batch = {size = 64, micro = 8}
    wire = "cast(dtype=bf16)"
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from paceline import config
from paceline.errors import PlanError
from paceline.plan.command_plan import CommandPlan, names_in_plan, read_plan
from paceline.plan.plan import Plan

__all__ = [
    "AUTO",
    "ERROR_SPARE",
    "NO_CLUSTER",
    "OWN_FLAGS",
    "Assignment",
    "Job",
    "assignment_from_json",
    "assignment_to_json",
    "flag_of",
    "head_address",
    "read_engine_table",
    "read_job_file",
    "read_plan_names",
]

NO_CLUSTER = "off"  # as Job.cluster: nothing is predicted
AUTO = "auto"  # the head of hosts that meet in the run's directory

OWN_FLAGS = {"run_as": "--as", "run_for": "--for"}  # fields of Job with an option of another name

# Launchers that are known but not built yet: what to use until they are.
LAUNCHERS_NOT_BUILT = {
    "slurm": "launcher='local' and start the command inside an allocation: srun paceline run train.py",
    "mpi": "launcher='local' and start the script with mpirun: mpirun -n 4 python train.py",
    "torchrun": "launcher='local', or start the script with torchrun: torchrun --nproc-per-node 4 train.py",
    "ray": "launcher='local'",
    "kubernetes": "launcher='local' with hosts=n and head='HOST:PORT' in each pod",
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Program and place of a run: all that cannot change its numbers. None means "decided when the run starts".

    The fields are those of a job file. All but `program` and `args` are parameters of `paceline.run`, which explains
    each. Times are in seconds. Raises PlanError for values out of range, with the legal ones and the remedy.

    Example::

        job = paceline.Job(program="train.py", workers=4, save_every=100, keep=3)
        assert job.timeout_s == 600.0
    """

    program: str = ""  # path of a script; "" for paceline.run(fn)
    args: tuple[str, ...] = ()  # the script's own arguments
    run_as: Literal["deepspeed", "horovod"] | None = None  # the framework that an unmodified program is written for,
    # for which `compat` stands in
    run_for: Literal["tensorflow"] | None = None  # the framework that distributes an unmodified program by itself: it
    # is only started, watched and restarted (paceline.plan.program_tasks)
    workers: int | None = None  # of the whole job, over all hosts; None: the plan's replicas, or 1
    servers: int | None = None  # with run_for: parameter servers, beside `workers` and a chief; None: there are none
    launcher: Literal["local", "inline"] = "local"  # "local" | "inline" (worker 0 in the calling process, for pdb)
    hosts: int = 1  # the same command is started once on each
    head: str | None = None  # HOST:PORT where the hosts meet, or "auto": in the run_dir, on a disk that they share;
    # needed when hosts > 1
    slots: int | None = None  # workers of this host, where the hosts are not alike; None: an even share
    token_file: str | None = None  # holds the job's token; else the environment's PACELINE_TOKEN; needed when hosts > 1
    private_network: bool = False  # nobody else reaches the network between the hosts: tensors travel in the clear
    run_dir: str | None = None  # None: runs/<program>-<date>-<time>
    fresh: bool = False  # do not continue from checkpoints found in run_dir
    save_every: int | None = None  # steps between checkpoints; None: every save_every_s seconds
    save_every_s: float = 300.0  # without save_every: least seconds between checkpoints; 0: only worker.save()
    save_at_end: bool = True  # one more checkpoint after the last step
    keep: int = 3  # newest complete checkpoints that are kept
    remote_dir: str | None = None  # an address in object storage, "s3://bucket/runs/first": checkpoints are copied
    # there behind training, and a run_dir without newer ones continues from there
    remote_wait_s: float = 600.0  # at the run's end, so long for checkpoints that are not there yet
    timeout_s: float = 600.0  # a worker waits this long for its peers
    restart_lost: bool = False  # a program with a loop of its own: start all workers again after one was lost
    balance: bool = False  # give persistently slower workers fewer micro-batches of each step
    noise_scale: bool = True  # measure the gradient noise scale: how large a batch, on how many workers, still pays
    silence_s: float = 10.0  # a host that is not heard of for so long is lost, and in elastic runs a worker
    patience_s: float = 60.0  # elastic runs: with fewer replicas than the plan's least, for so long, save and end;
    # and so long a run that could begin again waits for another host in place of a lost one
    grace_s: float = 30.0  # after SIGTERM the workers may take so long to finish the step, save and leave
    device: Literal["auto", "cpu", "cuda", "cuda-shared"] = (
        "auto"  # "auto": a GPU for each worker if the host has enough, else the CPU; "cuda-shared": they may share one
    )
    threads: int | None = None  # CPU threads of each worker; None: cores of the host / workers on it
    metrics_port: int | None = None  # Prometheus endpoint; 0: any free port; None: no endpoint
    metrics_host: str = "127.0.0.1"
    tensorboard: bool = True
    log: tuple[Literal["wandb", "mlflow"], ...] = ()  # experiment trackers that get the run's numbers
    show: Literal["first", "all"] = "first"  # whose standard output the console shows: "first" | "all"
    max_steps: int | None = None  # stop after this global step
    cluster: str | None = None  # of the catalogue, or a file's: its steps are predicted, and compared with the run's;
    # None: cluster.toml in the working directory, if there is one; "off": no cluster
    capture_dir: str | None = None  # losses, gradients and weights are written here, for comparison

    def __post_init__(self) -> None:
        config.check_fields(self)
        for name in ("workers", "servers", "hosts", "slots", "save_every", "keep", "threads", "max_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"Job.{name} is {value}; it must be at least 1.")
        for name in ("timeout_s", "silence_s", "patience_s", "grace_s", "remote_wait_s"):
            if getattr(self, name) <= 0:
                raise PlanError(f"Job.{name} is {getattr(self, name)}; it must be more than 0 seconds.")
        if self.save_every_s < 0:
            raise PlanError(
                f"Job.save_every_s is {self.save_every_s}; it must be seconds between two saves, or 0 for none by time."
            )
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise PlanError(f"Job.metrics_port is {self.metrics_port}; it must be from 0 (any free port) to 65535.")
        if self.head not in (None, AUTO):
            head_address(str(self.head))
        if self.head == AUTO and self.run_dir is None:
            raise PlanError(
                "head='auto' has the hosts meet in the run directory: use run_dir='...' (--run-dir), the same on all, "
                "on a disk that they share."
            )
        if self.remote_dir is not None and self.hosts > 1 and self.run_dir is None:
            raise PlanError(
                "remote_dir on several hosts needs a run_dir (--run-dir), the same on all: what is downloaded lies "
                "there before the hosts meet."
            )
        if self.cluster is not None and not self.cluster.strip():
            raise PlanError(
                f"Job.cluster is {self.cluster!r}; it must be a cluster's name, the path of a cluster file, or 'off' "
                "for no cluster."
            )
        self._check_hosts()
        self._check_program()

    def _check_program(self) -> None:
        """Raise PlanError for what another framework's program cannot have."""
        if self.servers is not None and self.run_for is None:
            raise PlanError(
                f"Job.servers is {self.servers}; it is for programs with servers of their own: add run_for="
                "'tensorflow' (--for tensorflow). The parameter servers of a plan are said in the plan: "
                "parameterserver(...)."
            )
        if self.run_for is None:
            return
        if not self.program:
            raise PlanError(f"run_for={self.run_for!r} needs a script: paceline run --for {self.run_for} train.py.")
        if self.run_as is not None:
            raise PlanError(
                f"run_as={self.run_as!r} and run_for={self.run_for!r} exclude each other: a program is of one "
                "framework."
            )
        if self.launcher == "inline":
            raise PlanError(
                f"launcher='inline' runs worker 0 in this process, and a program of {self.run_for} needs one of its "
                "own: use launcher='local'. To debug one task, start the script by itself: python train.py."
            )
        unused = {name: getattr(self, name) for name in OF_STEPS if getattr(self, name) != _DEFAULTS[name]}
        if self.cluster not in (None, NO_CLUSTER):
            unused["cluster"] = self.cluster
        if unused:
            listed = ", ".join(f"{name}={value!r}" for name, value in unused.items())
            raise PlanError(
                f"{listed} cannot be used with run_for={self.run_for!r}: the program takes its steps, and saves, by "
                "itself. Leave it out, and say it in the program."
            )

    def _check_hosts(self) -> None:
        if self.hosts > 1 and self.head is None:
            raise PlanError(
                f"A job on {self.hosts} hosts needs a rendezvous address: use head='HOST:PORT' (--head), "
                "the same on all, or head='auto' with a run_dir on a disk that they share. To have an engine start the "
                "hosts: on='slurm', 'ssh', ... (--on)."
            )
        if self.hosts > 1 and self.launcher == "inline":
            raise PlanError(
                "launcher='inline' runs worker 0 in this process, on one host: use hosts=1, or launcher='local'."
            )
        if self.workers is not None and self.workers < self.hosts:
            raise PlanError(
                f"{self.workers} workers cannot fill {self.hosts} hosts: use workers={self.hosts} or more "
                "(workers counts the whole job)."
            )

    @staticmethod
    def refusal(name: str, value: object) -> str | None:
        """Return why a launcher that is known is not accepted yet; None for everything else."""
        if name == "launcher" and value in LAUNCHERS_NOT_BUILT:
            return f"Job(launcher={value!r}) is not built yet. Use {LAUNCHERS_NOT_BUILT[str(value)]}."
        return None


# Fields that are about steps and saves, which another framework's program takes by itself.
OF_STEPS = (
    "fresh", "save_every", "save_every_s", "save_at_end", "keep", "remote_dir", "balance", "noise_scale", "max_steps",
    "capture_dir",
)  # fmt: skip
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Job)}

# In a worker's directory: space that is kept for its error.json, which may have to tell of a full disk.
ERROR_SPARE = ".error.spare"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """What a supervisor or an external launcher gives one worker. Travels as JSON, holds no secrets."""

    rank: int
    workers: int
    local_rank: int
    local_workers: int
    host: str  # this host's name, for people
    host_index: int
    hosts: int
    address: str  # of this host as its peers see it; "127.0.0.1" when there is one host
    run_dir: str
    attempt: int
    worker_dir: str  # RUN/attempt_n/worker_k
    channel_fd: int  # inherited socket to the supervisor's key-value store; -1 where there is none
    command_started: float  # clock.now() when the user's command began
    job: Job
    plan: CommandPlan = dataclasses.field(default_factory=CommandPlan)  # of --plan, job file and --set
    given: tuple[str, ...] = ()  # Job fields that the command or job file set: they win over the script's
    snapshot_fds: tuple[
        int, ...
    ] = ()  # inherited: memory for its snapshots, and what it begins with (paceline.comm.memory_checkpoint)
    begins_at: int | None = None  # with the state after this step, which is in the last of them
    micro: int | None = None  # samples of a micro-batch, if the memory was too little for the plan's
    joins: bool = False  # it comes later: the others are at work, and it is taken in between two of their steps
    incarnation: int = 0  # of its replica: how many were started before, of any number


def read_engine_table(path: Path) -> str | Mapping[str, Any] | None:
    """Return what a job file says of the engine that is to run it, as text or a table; None where it says nothing."""
    found = config.load_toml(Path(path)).get("engine")
    if not isinstance(found, (str, dict, type(None))):
        raise PlanError(f"{path}: engine is {found!r}; it must be a table, or one line of text such as 'slurm'.")
    return found


def read_plan_names(path: Path) -> tuple[str, ...] | None:
    """Return the fields that a job file's plan gives, such as "batch.size"; None where it has no plan."""
    return names_in_plan(config.load_toml(Path(path)).get("plan"))


def head_address(head: str) -> tuple[str, int]:
    """Return host and port of "HOST:PORT" ("[::1]:29500" for IPv6); PlanError where it is something else."""
    host, colon, port = head.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise PlanError(
            f"Job.head is {head!r}; it must be HOST:PORT with a port from 1 to 65535, for example 'node1:29500', or "
            "'auto' for hosts that share the disk of the run directory."
        )
    return host, int(port)


def assignment_to_json(assignment: Assignment) -> str:
    """Return one line of JSON that `assignment_from_json` reads back."""
    return json.dumps(config.to_table(assignment) | {"plan": assignment.plan.to_table()})


def assignment_from_json(text: str) -> Assignment:
    """Read an assignment; PlanError where a field is missing, unknown or wrong, ValueError where it is not JSON."""
    table = json.loads(text)
    if "plan" in table:
        table["plan"] = CommandPlan.from_table(table["plan"])
    return config.read(Assignment, table, path="assignment")


def flag_of(field: dataclasses.Field[Any]) -> str:
    """Return the command's option for a Job field: what is on by default gets the option that turns it off."""
    if field.name in OWN_FLAGS:
        return OWN_FLAGS[field.name]
    return f"--{'no-' if field.default is True else ''}{field.name.replace('_', '-')}"


def read_job_file(
    path: Path, changes: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None
) -> tuple[Job, Plan | None, tuple[str, ...]]:
    """Return the job, its plan if it has one, and the names of the Job fields that are set, in order.

    `changes` are Job fields that win over the file's: they are merged before the job is checked as a whole, so that a
    file may leave open what the command line adds. `defaults` are for what neither sets. Raises PlanError that begins
    with the file's path.
    """
    path = Path(path)
    table = config.load_toml(path)
    table.pop("engine", None)
    try:
        plan = read_plan(table.pop("plan")) if "plan" in table else None
        program = table.get("program")
        if isinstance(program, str) and program:
            table["program"] = str(path.parent / program)
        table |= changes or {}
        return config.read(Job, {**(defaults or {}), **table}), plan, tuple(table)
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error
