"""`horovodrun` command lines, run by `paceline run`.

    python -m paceline.compat.horovod.horovodrun -np 2 python train.py

Every option of horovodrun is taken over, or is named in a sentence as without effect here, or is refused by its name.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.cli import main as cli
from paceline.compat.horovod.program import VERSION
from paceline.environment import set_variables
from paceline.errors import PlanError

__all__ = ["RunCommand", "main", "run_command"]

LOCAL = ("localhost", "127.0.0.1", "::1")
MODULE_PROGRAM = Path(__file__).with_name("run_module.py")
DISCOVERY_LIMIT_S = 60.0

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
    "--elastic-timeout": (1, "the number of workers stays the same"),
    "--reset-limit": (1, "a run begins again as long as it comes further"),
    "--blacklist-cooldown-range": (2, "the hosts stay the same"),
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
    """What a horovodrun command line becomes: the words for `paceline`, variables, and sentences for the user."""

    words: tuple[str, ...]
    variables: dict[str, str]
    notes: tuple[str, ...]


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
    return cli.main(command.words)


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
    places, more = _places(values)
    notes += more
    return RunCommand(
        words=("run", "--as", "horovod", *places, *_program(left)), variables=variables, notes=tuple(notes)
    )


def _value(option: str, equals: str, value: str, left: list[str]) -> str:
    if equals:
        return value
    if not left:
        raise PlanError(f"{option} needs a value.")
    return left.pop(0)


def _places(values: dict[str, str]) -> tuple[list[str], list[str]]:
    """Return the options that say where how many workers run, and what is to be said of them."""
    wanted, notes = _count("-np", values.get("np")), list[str]()
    is_elastic = any(name in values for name in ("least", "most", "discovery"))
    if is_elastic:
        wanted = wanted or _count("--min-np", values.get("least")) or _count("--max-np", values.get("most"))
        notes.append(
            "the number of workers stays the same: after a loss all begin again from the last commit of hvd.elastic."
        )
    hosts = _hosts(values)
    if wanted is None:
        raise PlanError("-np is missing: how many workers the program runs on.")
    remote = [(name, slots) for name, slots in hosts if not _is_here(name)]
    if hosts and sum(slots for _, slots in hosts) < wanted:
        raise PlanError(
            f"-np is {wanted}, and the hosts have {sum(slots for _, slots in hosts)} slots: give more hosts."
        )
    if not remote:
        for name, option in (("port", "-p"), ("identity", "-i")):
            if name in values:
                notes.append(f"{option} has no effect: all workers run on this host.")
        return ["--workers", str(wanted)], notes
    words, left = list[str](), wanted
    for name, slots in hosts:
        taken = min(slots, left)
        left -= taken
        if taken:
            words.append(f"{name}:{taken}")
    place = ["--on", "ssh", "--hosts", ",".join(words)]
    for name in ("port", "identity"):
        if name in values:
            option = "--ssh-port" if name == "port" else "--ssh-identity-file"
            raise PlanError(
                f"{option} cannot be taken over: put it into ~/.ssh/config, which `paceline run --on ssh` reads."
            )
    return place, notes


def _hosts(values: dict[str, str]) -> list[tuple[str, int]]:
    """Return the hosts with their slots, from whichever option names them; nothing for this host alone."""
    default = _count("--slots-per-host", values.get("slots")) or 1
    if "hosts" in values:
        lines = values["hosts"].split(",")
    elif "hostfile" in values:
        lines = _lines(Path(values["hostfile"]))
    elif "discovery" in values:
        lines = _discovered(values["discovery"])
    else:
        return []
    return [_host(line, default) for line in lines if line.strip() and not line.strip().startswith("#")]


def _host(line: str, default: int) -> tuple[str, int]:
    """Read `host:slots`, or `host slots=n` as in a host file."""
    name, _, rest = line.strip().replace(" slots=", ":").replace("\t", "").partition(":")
    slots = default if not rest else _count(f"the slots of {name}", rest.strip())
    if not name or slots is None:
        raise PlanError(f"{line!r} is no host: write HOST:SLOTS, as in node1:4.")
    return name.strip(), slots


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise PlanError(f"the host file {path} cannot be read: {error.strerror}.") from error


def _discovered(script: str) -> list[str]:
    """Run a discovery script once."""
    try:
        found = subprocess.run(
            [os.path.abspath(script)], capture_output=True, text=True, timeout=DISCOVERY_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PlanError(f"--host-discovery-script {script} has failed: {error}.") from error
    return found.stdout.splitlines()


def _is_here(name: str) -> bool:
    return name in LOCAL or name in (socket.gethostname(), socket.getfqdn())


def _count(what: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise PlanError(f"{what} is {text!r}; it must be a whole number, 1 or more.")
    return int(text)


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
