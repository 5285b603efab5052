"""Slurm: a batch script for `sbatch`, in which `srun` starts `paceline run` once on each host.

A run with a fixed number of workers gets one allocation of all its hosts. An elastic one gets a job array with a task
for each host: Slurm starts, preempts and requeues each host by itself, and the run goes on with the others. More hosts
are a second array of the same script. All hosts meet in the run's directory, which they share.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from paceline import config, environment
from paceline.errors import LaunchError, PlanError
from paceline.launch.engines.console_files import ConsoleFiles
from paceline.launch.engines.engine import Answer, Console, EngineState, Refusal, Say
from paceline.launch.engines.engine_record import FILES, EngineRecord
from paceline.launch.engines.follow import follow
from paceline.launch.engines.run_state import coordinators_host, ended, hosts_at_work
from paceline.launch.engines.shell import ask, script_command, tell
from paceline.launch.engines.submission import Document, Submission
from paceline.private_files import write_private

__all__ = ["Slurm"]

SCRIPT, TOKEN, STOPPED, LEAVE = "job.sh", "token", "stopped", "leave"
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SUSPENDED", "SPECIAL_EXIT", "STOPPED")
CANCELLED = 143  # exit status of a job that was cancelled before it began: as after SIGTERM
GONE = ("Invalid job id", "does not exist")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Slurm:
    """Settings of a job for Slurm; None leaves the choice to the cluster.

    Example::

        engine = paceline.Slurm(partition="gpu", time="4:00:00", gpus=8)

    :param partition: as `sbatch` takes it; `account` and `qos` too.
    :param time: the limit, "4:00:00"; the run is warned `notice_s` seconds before it, saves, and is requeued.
    :param cpus: cores of each host; `gpus` and `memory` ("64G") are for each host, too.
    :param notice_s: more than the job's `grace_s` (60).
    :param most_restarts: so often a host's job is requeued after it has saved and left, or lost others (20).
    :param options: more of sbatch's: ("--constraint=a100", "--exclusive").
    :param setup: shell lines that come first on each host: "module load cuda".
    :param python: the interpreter on the hosts (the one that submits).
    :raises PlanError: a setting is out of range.
    """

    title: ClassVar[str] = "Slurm"
    may_detach: ClassVar[bool] = True
    takes_functions: ClassVar[bool] = False
    may_resize: ClassVar[bool] = True
    reads_ended: ClassVar[bool] = False
    begins_with_all: ClassVar[bool] = False

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    cpus: int | None = None
    gpus: int | None = None
    memory: str | None = None
    notice_s: int = 60
    most_restarts: int = 20
    options: tuple[str, ...] = ()
    setup: str = ""
    python: str | None = None

    def __post_init__(self) -> None:
        config.check_fields(self)
        for name, least in (("cpus", 1), ("gpus", 1), ("notice_s", 1), ("most_restarts", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise PlanError(f"Slurm.{name} is {value}; it must be at least {least}.")
        for option in self.options:
            if not option.startswith("-") or "\n" in option:
                raise PlanError(
                    f"Slurm.options has {option!r}; each must be an option of sbatch, such as '--exclusive'."
                )

    def refusals(self, submission: Submission) -> Iterator[Refusal]:
        """Yield why Slurm cannot run the job."""
        if self.notice_s <= submission.job.grace_s:
            yield Refusal(
                says=f"Slurm would warn the run {self.notice_s} s before the time limit, and its workers may take "
                f"{submission.job.grace_s:.0f} s (grace_s) to save.",
                fix=f"Use slurm(notice_s={math.ceil(submission.job.grace_s) + 30}), or a smaller --grace-s.",
            )

    def render(self, submission: Submission) -> Sequence[Document]:
        """Return the script, and the commands that come before it."""
        files = submission.run_dir / FILES
        token = shlex.quote(str(files / TOKEN))
        before = (
            f"mkdir -p -m 700 {shlex.quote(str(files))}\n"
            f"(umask 077; python3 -c 'import secrets; print(secrets.token_hex(32))' > {token})\n"
        )
        return (
            Document(
                name="before: the hosts prove by a token that they belong to the job", text=before, language="bash"
            ),
            Document(name="job script, for sbatch", text=self._script(submission), language="bash"),
        )

    def start(self, submission: Submission, record: EngineRecord, *, token: str, say: Say, detach: bool) -> int:
        """Submit the script; follow the job unless `detach`."""
        (record.files / STOPPED).unlink(missing_ok=True)
        for old in record.files.glob(f"{LEAVE}_*"):
            old.unlink(missing_ok=True)
        write_private(record.files / TOKEN, token.encode())
        script = record.files / SCRIPT
        write_private(script, self._script(submission).encode())
        job = _sbatch(script, folder=submission.folder)
        shown = {path.name: path.stat().st_size for path in record.files.glob("host_*.log")}
        record = record.changed(handle={"jobs": [job], "elastic": submission.is_elastic, "shown": shown})
        say(f"submitted to Slurm as job {job}; its run directory is {submission.run_dir}")
        return 0 if detach else follow(self, record, say=say)

    def state(self, record: EngineRecord) -> EngineState:
        """Ask squeue."""
        tasks = self._tasks(record)
        live = [one for one in tasks if one.state not in ("COMPLETING",)]
        jobs = record.handle["jobs"]
        name = f"Slurm job{'s' if len(jobs) > 1 else ''} {', '.join(map(str, jobs))}"
        if not tasks:
            return ended(record, name, otherwise=lambda: self._ended(record))
        running = [one for one in live if one.state not in WAITING]
        if running:
            more = len(live) - len(running)
            return EngineState(
                phase="running",
                says=f"{name} run{'' if len(jobs) > 1 else 's'} on {', '.join(one.nodes for one in running)}"
                + (f"; {more} more host{'s are' if more > 1 else ' is'} pending" if more else ""),
            )
        reasons = ", ".join(dict.fromkeys(one.text for one in (live or tasks)))
        return EngineState(phase="waiting", says=f"{name} {'are' if len(jobs) > 1 else 'is'} {reasons}")

    def console(self, record: EngineRecord) -> Console:
        """The hosts print into files of the run's directory."""
        return ConsoleFiles(record.files, "host_*.log", record.handle.get("shown"))

    def resize(self, record: EngineRecord, hosts: int) -> str:
        """Submit another array for more hosts, or end those that have no workers."""
        if not record.handle["elastic"]:
            raise PlanError(
                "The run has one allocation of all its hosts, and cannot change them: its plan has a fixed number of "
                "replicas. Start it with a range, for example --plan replicas=1-4."
            )
        tasks = [one for one in self._tasks(record) if one.state != "COMPLETING"]
        if hosts > len(tasks):
            more = hosts - len(tasks)
            job = _sbatch(record.files / SCRIPT, f"--array=0-{more - 1}", folder=Path(record.folder))
            record.changed(handle={**record.handle, "jobs": [*record.handle["jobs"], job]}, hosts=hosts)
            return f"asked Slurm for {more} more host{'s' if more > 1 else ''} (job {job}), to join the run"
        pending = [one for one in tasks if one.state in WAITING]
        at_work = frozenset[str]() if len(pending) >= len(tasks) - hosts else hosts_at_work(self, record)
        idle = [one for one in tasks if one not in pending and one.nodes not in at_work]
        given_back = [*pending, *idle][: len(tasks) - hosts]
        for one in given_back:
            (record.files / f"{LEAVE}_{one.number}").touch(mode=0o600)
            tell(["scancel", *([] if one in pending else ["--signal=TERM"]), one.number], what="Slurm ends a host")
        record.changed(hosts=len(tasks) - len(given_back))
        return f"gave {len(given_back)} host{'s' if len(given_back) != 1 else ''} back to Slurm"

    def stop(self, record: EngineRecord) -> None:
        """Have the hosts save and leave, and be requeued no more."""
        (record.files / STOPPED).touch(mode=0o600)
        for one in self._tasks(record):
            if one.state in WAITING:
                tell(["scancel", one.number], what="Slurm cancels a pending job")
            elif one.state != "COMPLETING":
                tell(["scancel", "--signal=TERM", one.number], what="Slurm stops a host")

    def at_head(self, record: EngineRecord, words: Sequence[str]) -> Answer:
        """Run a command beside the coordinator, as one more step of its job."""
        head = coordinators_host(record.run_dir)
        running = [one for one in self._tasks(record) if one.state == "RUNNING"]
        there = [one for one in running if head in _nodes(one.nodes)]
        if not there:
            raise LaunchError(f"Slurm runs no host of {record.run_dir} now.")
        step = ["srun", "--overlap", "--ntasks=1", "--nodes=1", f"--jobid={there[0].job}", f"--nodelist={head}"]
        return ask([*step, "--quiet", f"--chdir={record.folder}", *words], what="Slurm runs a command beside the run")

    def _script(self, submission: Submission) -> str:
        files = submission.run_dir / FILES
        number = "%A_%a" if submission.is_elastic else "%j"
        nodes = 1 if submission.is_elastic else submission.job.hosts
        settings: dict[str, Any] = {
            "job-name": submission.name,
            "array": f"0-{submission.job.hosts - 1}" if submission.is_elastic else None,
            "nodes": nodes,
            "ntasks-per-node": 1,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "time": self.time,
            "cpus-per-task": self.cpus,
            "gpus-per-node": self.gpus,
            "mem": self.memory,
            "chdir": submission.folder,
            "output": str(files).replace("%", "%%") + f"/host_{number}.log",
            "open-mode": "append",
            "signal": f"USR1@{self.notice_s}",
        }
        lines = [f"#SBATCH --{name}={shlex.quote(str(value))}" for name, value in settings.items() if value is not None]
        # An allocation keeps its other hosts when one is lost, so that they can save.
        kept = [] if submission.is_elastic else ["#SBATCH --no-kill"]
        lines += ["#SBATCH --requeue", *kept, *(f"#SBATCH {option}" for option in self.options)]
        command = submission.host_command(python=self.python, token_file=str(files / TOKEN))
        srun = [
            "srun",
            "--kill-on-bad-exit=0",
            "--no-kill",
            *([] if self.cpus is None else [f"--cpus-per-task={self.cpus}"]),
        ]
        what = "All hosts of the run."
        if submission.is_elastic:
            what = "One host of the run: each task of the array is one, and Slurm starts and requeues it by itself."
        unwanted = f"[ ! -e {shlex.quote(str(files / STOPPED))} ]"
        if submission.is_elastic:
            task = '"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"'
            unwanted += f" \\\n    && [ ! -e {shlex.quote(str(files / LEAVE))}_{task} ]"
        return "\n".join(
            [
                "#!/bin/bash",
                f"# {what} Warned of the time limit by SIGUSR1, the run saves and ends with 75.",
                *lines,
                *(["", *self.setup.rstrip("\n").split("\n")] if self.setup else []),
                "",
                f"export {environment.ENGINE}=slurm",
                script_command(srun, command),
                "status=$?",
                "# 75: saved and left; 76: hosts were lost. Both go on with the next start.",
                "if [ $status -eq 75 -o $status -eq 76 ] \\",
                f'    && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {self.most_restarts} ] \\',
                f"    && {unwanted}; then",
                '    scontrol requeue "$SLURM_JOB_ID"',
                "fi",
                "exit $status",
                "",
            ]
        )

    def _tasks(self, record: EngineRecord) -> list[Task]:
        """The jobs or array tasks that Slurm has not forgotten and that have not ended, by number."""
        jobs = ",".join(map(str, record.handle["jobs"]))
        answer = ask(
            ["squeue", "--noheader", "--array", f"--jobs={jobs}", "--format=%i|%A|%T|%r|%N"],
            what="Slurm's queue is read",
        )
        if answer.exit_code != 0 and not any(text in answer.errors for text in GONE):
            raise LaunchError(f"Slurm's queue cannot be read: {answer.errors.strip()}")
        rows = [line.split("|") for line in answer.output.decode(errors="replace").splitlines() if line.count("|") == 4]
        return [Task(number=row[0], job=row[1], state=row[2], reason=row[3], nodes=row[4]) for row in rows]

    def _ended(self, record: EngineRecord) -> tuple[int | None, str]:
        """The exit status that Slurm remembers for a while, and its word for it."""
        for job in record.handle["jobs"]:
            answer = ask(["scontrol", "--oneliner", "show", "job", str(job)], what="Slurm is asked about a job")
            text = answer.output.decode(errors="replace")
            state, code = re.search(r"JobState=(\w+)", text), re.search(r"ExitCode=(\d+):(\d+)", text)
            if state and code:
                ended = int(code[1]) or (128 + int(code[2]) if int(code[2]) else 0)
                return ended or (0 if state[1] == "COMPLETED" else CANCELLED), state[1].lower()
        return None, "gone"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A job or array task in squeue's words."""

    number: str  # "17", or "17_3" in an array
    job: str  # the same as a single number
    state: str
    reason: str
    nodes: str

    @property
    def text(self) -> str:
        """Its state, for people."""
        reason = "" if self.reason in ("None", "") else f" ({self.reason})"
        return f"{self.state.lower()}{reason}"


def _sbatch(script: Path, *options: str, folder: Path) -> int:
    said = tell(["sbatch", "--parsable", *options, str(script)], what="Slurm does not take the job")
    number = said.strip().partition(";")[0]
    if not number.isdecimal():
        raise LaunchError(f"sbatch did not say the job's number, but {said.strip()!r}.")
    return int(number)


def _nodes(text: str) -> tuple[str, ...]:
    from paceline.world_detection import expand_hosts

    return expand_hosts(text)
