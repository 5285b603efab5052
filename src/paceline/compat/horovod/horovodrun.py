"""`horovodrun` command lines, run by `paceline run`.

    python -m paceline.compat.horovod.horovodrun -np 2 python train.py

Every option of horovodrun is taken over, or is named in a sentence as without effect here, or is refused by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.cli import main as cli
from paceline.compat.horovod.discovery import HostScript, count_of, hosts_of, is_here, lines_of
from paceline.compat.horovod.program import VERSION
from paceline.environment import set_variables
from paceline.errors import PlanError
from paceline.launch.coordinator.control_socket import send_command

__all__ = ["RunCommand", "main", "run_command"]

MODULE_PROGRAM = Path(__file__).with_name("run_module.py")
MOST = 64  # workers, where a command line names no most

# Option -> the variable by which a worker reads it, and what its value becomes.
VARIABLES: dict[str, tuple[str, Callable[[str], str]]] = {
    "--fusion-threshold-mb": ("HOROVOD_FUSION_THRESHOLD", lambda text: str(int(text) << 20)),
    "--cycle-time-ms": ("HOROVOD_CYCLE_TIME", str),
    "--timeline-filename": ("HOROVOD_TIMELINE", lambda text: str(Path(text).resolve())),
    "--stall-check-warning-time-seconds": ("HOROVOD_STALL_CHECK_TIME_SECONDS", str),
    "--stall-check-shutdown-time-seconds": ("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str),
}
SWITCHES = {
    "--timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    "--no-timeline-mark-cycles": ("HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    "--no-stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "1"),
    "--stall-check": ("HOROVOD_STALL_CHECK_DISABLE", "0"),
}
TAKEN = {  # with a value, and read below
    "-np": "np",
    "--num-proc": "np",
    "-H": "hosts",
    "--hosts": "hosts",
    "-hostfile": "hostfile",
    "--hostfile": "hostfile",
    "--host-discovery-script": "discovery",
    "--slots-per-host": "slots",
    "--slots": "slots",
    "--min-np": "least",
    "--min-num-proc": "least",
    "--max-np": "most",
    "--max-num-proc": "most",
    "--elastic-timeout": "patience",
    "-p": "port",
    "--ssh-port": "port",
    "-i": "identity",
    "--ssh-identity-file": "identity",
}
HIERARCHY = "the workers of one host share memory; with several hosts, all of them use sockets"
IGNORED = {  # option -> how many values follow, and the sentence
    "--disable-cache": (0, "nothing is checked in advance, so nothing is cached"),
    "--start-timeout": (1, "--timeout-s of `paceline run` says how long workers wait for each other"),
    "--gloo-timeout-seconds": (1, "--timeout-s of `paceline run` says how long workers wait for each other"),
    "--network-interfaces": (1, "workers meet by the address of their host; --set engine.address chooses another"),
    "--network-interface": (1, "workers meet by the address of their host; --set engine.address chooses another"),
    "--output-filename": (1, "each worker's output is in the run's directory"),
    "--verbose": (0, "the console shows the run"),
    "--cache-capacity": (1, "requests travel in full: they are small"),
    "--hierarchical-allreduce": (0, HIERARCHY),
    "--no-hierarchical-allreduce": (0, HIERARCHY),
    "--hierarchical-allgather": (0, HIERARCHY),
    "--no-hierarchical-allgather": (0, HIERARCHY),
    "--torus-allreduce": (0, "there is no NCCL here"),
    "--no-torus-allreduce": (0, "there is no NCCL here"),
    "--autotune": (0, "there are no parameters to tune"),
    "--no-autotune": (0, "there are no parameters to tune"),
    "--autotune-log-file": (1, "there are no parameters to tune"),
    "--autotune-warmup-samples": (1, "there are no parameters to tune"),
    "--autotune-steps-per-sample": (1, "there are no parameters to tune"),
    "--autotune-bayes-opt-max-samples": (1, "there are no parameters to tune"),
    "--autotune-gaussian-process-noise": (1, "there are no parameters to tune"),
    "--reset-limit": (1, "a program begins again as long as it comes further"),
    "--blacklist-cooldown-range": (2, "a lost worker is replaced at once"),
    "--mpi-threads-disable": (0, "there is no MPI here"),
    "--no-mpi-threads-disable": (0, "there is no MPI here"),
    "--mpi-args": (1, "there is no MPI here"),
    "--binding-args": (1, "there is no MPI here"),
    "--tcp": (0, "there is no MPI here"),
    "--mpi": (0, "there is no MPI here: Paceline starts the workers itself"),
    "--gloo": (0, "Paceline starts the workers itself"),
    "--num-nccl-streams": (1, "there is no NCCL here"),
    "--thread-affinity": (1, "the system places threads"),
    "--log-level": (1, "what the coordinator reports goes to the log of worker 0"),
    "--log-with-timestamp": (0, "events.jsonl of each worker has the times"),
    "--log-without-timestamp": (0, "events.jsonl of each worker has the times"),
    "--log-hide-timestamp": (0, "events.jsonl of each worker has the times"),
    "--no-log-hide-timestamp": (0, "events.jsonl of each worker has the times"),
    "-prefix-timestamp": (0, "events.jsonl of each worker has the times"),
    "--prefix-output-with-timestamp": (0, "events.jsonl of each worker has the times"),
}
REFUSED = {
    "--config-file": "give its values as options",
    "--jsrun": "start `paceline run` on each host of the allocation, with --hosts and --head",
}
ABOUT = {"-v", "--version", "-cb", "--check-build", "-h", "--help"}
USAGE = """\
usage: python -m paceline.compat.horovod.horovodrun -np N [-H HOST:SLOTS,...] [horovodrun's other options]
       python SCRIPT.py [its arguments]

Runs a program written for horovod.torch on Paceline, by the command line that horovodrun would be given.
The command that is run instead is shown first: `paceline run --as horovod ...`.
"""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunCommand:
    """What a horovodrun command line becomes: the words for `paceline`, variables, and sentences for the user.

    `script`: what says, while the run goes on, how many of its workers there are to be; it begins with `workers`.
    """

    words: tuple[str, ...]
    variables: dict[str, str]
    notes: tuple[str, ...]
    workers: int
    script: HostScript | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    words: list[str]
    notes: list[str]
    workers: int
    script: HostScript | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _WorkerNumbers:
    """How many workers begin, and the fewest and the most of them later."""

    workers: int
    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most

    def words(self, patience: str | None) -> list[str]:
        """Return the options of `paceline run`; `patience`: --elastic-timeout."""
        if not self.is_elastic:
            return []
        limit = [] if patience is None else ["--patience-s", patience]
        return ["--plan", f"replicas={self.least}-{self.most}", *limit]


def main(words: Sequence[str] | None = None) -> int:
    """Run a horovodrun command line; returns the exit status."""
    given = list(sys.argv[1:] if words is None else words)
    if given and given[0] in ABOUT:
        print(USAGE if given[0] in ("-h", "--help") else f"Paceline, with the interface of horovod.torch {VERSION}")
        return 0
    try:
        command = run_command(given)
    except PlanError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        return 2
    for note in command.notes:
        print(f"horovodrun: {note}", file=sys.stderr)
    print(f"horovodrun: paceline {shlex.join(command.words)}", file=sys.stderr)
    set_variables(command.variables)
    with _following(command):
        return cli.main(command.words)


@contextlib.contextmanager
def _following(command: RunCommand) -> Iterator[None]:
    """While entered, give the run that this process supervises as many workers as the script says."""
    if command.script is None:
        yield
        return
    ends = threading.Event()
    follower = threading.Thread(
        target=command.script.follow,
        args=(_resize,),
        kwargs={"begins_with": command.workers, "ends": ends},
        name="paceline-host-script",
        daemon=True,
    )
    follower.start()
    try:
        yield
    finally:
        ends.set()


def _resize(workers: int) -> str | None:
    """Ask the run of this process for another number of workers; returns why it is refused, "" where it is not, and
    None where the run has not begun, or no attempt of it goes on."""
    try:
        answer = send_command(os.getpid(), {"op": "resize", "replicas": workers})
    except ConnectionError:
        return None
    return None if answer.get("has_begun") is False else str(answer.get("error", ""))


def run_command(words: Sequence[str]) -> RunCommand:
    """Translate a command line. Raises PlanError for options and values that cannot be taken."""
    values: dict[str, str] = {}
    variables: dict[str, str] = {}
    notes: list[str] = []
    left = list(words)
    while left and left[0].startswith("-"):
        option, equals, value = left.pop(0).partition("=")
        if option in SWITCHES:
            variables.update([SWITCHES[option]])
        elif option in VARIABLES:
            name, become = VARIABLES[option]
            text = _value(option, equals, value, left)
            try:
                variables[name] = become(text)
            except ValueError:
                raise PlanError(f"{option} is {text!r}; it must be a whole number.") from None
        elif option in TAKEN:
            values[TAKEN[option]] = _value(option, equals, value, left)
        elif option in IGNORED:
            count, why = IGNORED[option]
            for _ in range(count - bool(equals)):
                _value(option, "", "", left)
            notes.append(f"{option} has no effect: {why}.")
        elif option in REFUSED:
            raise PlanError(f"{option} cannot be taken over: {REFUSED[option]}.")
        else:
            raise PlanError(f"unknown option {option}: horovodrun has none of this name.")
    places = _places(values)
    return RunCommand(
        words=("run", "--as", "horovod", *places.words, *_program(left)),
        variables=variables,
        notes=(*notes, *places.notes),
        workers=places.workers,
        script=places.script,
    )


def _value(option: str, equals: str, value: str, left: list[str]) -> str:
    if equals:
        return value
    if not left:
        raise PlanError(f"{option} needs a value.")
    return left.pop(0)


def _places(values: dict[str, str]) -> _Places:
    """Say where how many workers run. Raises PlanError where there are too few hosts, or no number."""
    script = None
    if "discovery" in values and not values.keys() & {"hosts", "hostfile"}:
        script = HostScript(path=values["discovery"], slots=_default_slots(values))
    hosts, notes = _hosts(values, script), list[str]()
    slots = sum(number for _, number in hosts)
    numbers = _numbers(values, slots)
    if slots and slots < numbers.workers:
        raise PlanError(f"-np is {numbers.workers}, and the hosts have {slots} slots: give more hosts.")
    words = numbers.words(values.get("patience"))
    if all(is_here(name) for name, _ in hosts):
        for name, option in (("port", "-p"), ("identity", "-i")):
            if name in values:
                notes.append(f"{option} has no effect: all workers run on this host.")
        if script is not None and numbers.is_elastic:
            script = dataclasses.replace(script, least=numbers.least, most=numbers.most)
        return _Places(
            words=["--workers", str(numbers.workers), *words],
            notes=notes,
            workers=numbers.workers,
            script=script if numbers.is_elastic else None,
        )
    for name, option in (("port", "--ssh-port"), ("identity", "--ssh-identity-file")):
        if name in values:
            raise PlanError(
                f"{option} cannot be taken over: put it into ~/.ssh/config, which `paceline run --on ssh` reads."
            )
    if script is not None:
        notes.append("the hosts stay those that the script has named: not all of them are this one.")
    shares, left = list[str](), numbers.workers
    for name, number in hosts:
        taken = min(number, left)
        left -= taken
        if taken:
            shares.append(f"{name}:{taken}")
    place = ["--on", "ssh", "--hosts", ",".join(shares), *words]
    return _Places(words=place, notes=notes, workers=numbers.workers)


def _numbers(values: dict[str, str], slots: int) -> _WorkerNumbers:
    """Return how many workers there are, at first and later, where hosts have so many slots (0: it is not known)."""
    given, least = count_of("-np", values.get("np")), count_of("--min-np", values.get("least"))
    most = count_of("--max-np", values.get("most"))
    workers = given or least or most
    if workers is None:
        raise PlanError("-np is missing: how many workers the program runs on.")
    if not values.keys() & {"least", "most", "discovery"}:
        return _WorkerNumbers(workers=workers, least=workers, most=workers)
    least, most = least or workers, most or max(MOST, workers)
    if not least <= workers <= most:
        raise PlanError(f"-np is {workers}; it must be from --min-np, {least}, to --max-np, {most}.")
    if slots >= workers:
        workers = min(slots, most)  # as in Horovod: all that are there
    return _WorkerNumbers(workers=workers, least=least, most=most)


def _hosts(values: dict[str, str], script: HostScript | None) -> list[tuple[str, int]]:
    """Return the hosts with their slots, from whichever option names them; nothing for this host alone."""
    default = _default_slots(values)
    if "hosts" in values:
        return hosts_of(values["hosts"].split(","), default)
    if "hostfile" in values:
        return hosts_of(lines_of(Path(values["hostfile"])), default)
    return [] if script is None else script.hosts()


def _default_slots(values: dict[str, str]) -> int:
    return count_of("--slots-per-host", values.get("slots")) or 1


def _program(words: Sequence[str]) -> list[str]:
    """Return the script and its arguments, of `python train.py ...`, `python -m module ...` or `train.py ...`."""
    left = list(words)
    if not left:
        raise PlanError("the program is missing: horovodrun -np 2 python train.py")
    if Path(left[0]).name.startswith("python"):
        left.pop(0)
        while left and left[0] in ("-u", "-B", "-O"):
            left.pop(0)
        if left[:1] == ["-m"] and len(left) > 1:
            return [str(MODULE_PROGRAM), "--", *left[1:]]
    if not left or not left[0].endswith(".py"):
        shown = shlex.join(words)
        raise PlanError(f"{shown!r} cannot be run: it must be `python SCRIPT.py` or `python -m MODULE`.")
    return [left[0], "--", *left[1:]] if left[1:] else left


if __name__ == "__main__":
    sys.exit(main())
