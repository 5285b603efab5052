"""Runs of `elastic_program.py` over several hosts: the same command on each, each with a disk of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import warm
from elastic_runs import PROGRAM, Run, undisturbed
from network_hosts import NamespaceHost
from programs import child_environment

__all__ = ["GATE", "LIMIT_S", "PORT", "Command", "Spread", "like", "outcome", "shared", "spread", "until"]

PORT = 29517
STEPS, GATE = 24, 10
LIMIT_S = 120  # three supervisors, each with a warm parent, share what cores there are
SILENCE_S = 20.0  # who is silent is not what most of these runs are about, and a busy machine may be late


def like(steps: int = STEPS) -> Run:
    """The same training, undisturbed on one host."""
    return undisturbed(json.dumps({"job": {"max_steps": steps}}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """The command on one host, under way or over."""

    process: warm.Process
    folder: Path

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()

    def says(self, text: str) -> None:
        """Return when it has said this."""
        until(lambda: text in self.output, self, f"{text!r} was not said")

    def events_of(self, worker: int) -> Path:
        return self.folder / "run" / "attempt_1" / f"worker_{worker}" / "events.jsonl"

    def forget(self, *workers: int) -> None:
        """Throw away what workers have told that are no longer there: `started` means their successors then."""
        for worker in workers:
            self.events_of(worker).unlink()

    def started(self, *workers: int) -> None:
        """Return when these workers are about to run the user's function here."""
        files = [self.events_of(worker) for worker in workers]
        until(
            lambda: all(file.exists() and "WorkerStarted" in file.read_text() for file in files),
            self,
            f"workers {workers} did not start",
        )

    def pid_of(self, worker: int) -> int:
        """The process number of a worker of this host that has started."""
        events = map(json.loads, self.events_of(worker).read_text().splitlines())
        return next(int(event["pid"]) for event in events if event["event"] == "WorkerStarted")

    def end(self) -> int:
        return self.process.wait(LIMIT_S)

    def ledger_steps(self) -> list[int]:
        """What the workers of this host have committed, by their own ledgers."""
        return [line["step"] for line in self.ledger_lines()]

    def ledger_lines(self) -> list[dict[str, Any]]:
        """What their ledgers say about the steps."""
        ledgers = (self.folder / "run" / "attempt_1").glob("worker_*/ledger.jsonl")
        lines = [json.loads(line) for ledger in ledgers for line in ledger.read_text().splitlines()]
        return [line for line in lines if "step" in line]


class Spread:
    """One job; `start` it on host after host. The first one is the head."""

    def __init__(self, folder: Path, head: NamespaceHost, *, program: Path = PROGRAM, **options: Any) -> None:
        self.folder, self._head, self._options = folder, head, {"pause_s": 0.2, **options}
        self._program = program
        self.commands: list[Command] = []
        self.token("token", "0123456789abcdef0123456789abcdef")

    def token(self, name: str, text: str) -> str:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(text)
        return str(path)

    def start(self, host: NamespaceHost, **changes: Any) -> Command:
        """Start the command; `changes` are what is different on this host."""
        folder = self.folder / host.name
        folder.mkdir(exist_ok=True)
        job = {
            "run_dir": str(folder / "run"),
            "hosts": 2,
            "head": f"{self._head.address}:{PORT}",
            "token_file": str(self.folder / "token"),
            "max_steps": STEPS,
            "silence_s": SILENCE_S,
            **self._options.get("job", {}),
            **changes.pop("job", {}),
        }
        options = {**self._options, **changes, "job": job}
        environment = child_environment() | {
            "FAULTS": json.dumps(options.pop("faults", [])),
            "FAULT_DIR": str(self.folder),
            "OPTIONS": json.dumps(options),
        }
        with open(folder / "output", "a", encoding="utf-8") as output:
            words = [sys.executable, str(self._program)]
            process = warm.start(words, env=environment, cwd=folder, stdout=output, host=host)
        self.commands.append(Command(process=process, folder=folder))
        return self.commands[-1]

    @property
    def head(self) -> Command:
        return self.commands[0]

    @property
    def run_dir(self) -> Path:
        return self.head.folder / "run"

    def reached(self, step: int) -> None:
        """Return when the run has committed a step, and gone on to the next one."""
        metrics = self.run_dir / "metrics.jsonl"
        until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= step,
            self.head,
            f"step {step} was not reached",
        )

    def happened(self, event: str, *, times: int = 1) -> None:
        """Return when so many such events are in the run's record."""
        run = Run(self.head.folder, 0, "")
        until(lambda: len(run.events(event)) >= times, self.head, f"no {event} has come")

    def resize(self, replicas: int) -> None:
        """`paceline resize`, on the head's host."""
        self.command("resize", str(replicas))

    def command(self, name: str, *words: str) -> str:
        """A command of `paceline` about the run, on the head's host; returns what it says."""
        command = [sys.executable, "-m", "paceline", name, str(self.run_dir), *words]
        done = subprocess.run(
            [*self._head.prefix, *command], env=child_environment(), capture_output=True, text=True, timeout=LIMIT_S
        )
        if done.returncode != 0:
            raise AssertionError(done.stdout + done.stderr)
        return done.stdout

    def share_out(self, **shares: int) -> None:
        """Have the run go on with so many replicas on each host, as a pool does it."""
        pid = json.loads((self.run_dir / "run.json").read_text())["pid"]
        request = {"op": "resize", "replicas": sum(shares.values()), "hosts": shares}
        program = "from paceline.launch.coordinator.control_socket import send_command; "
        program += f"print(send_command({pid}, {request!r}))"
        done = subprocess.run(
            [*self._head.prefix, sys.executable, "-c", program],
            env=child_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        if "'says'" not in done.stdout:
            raise AssertionError(done.stdout + done.stderr)

    def open_gate(self) -> None:
        """Have the workers go on that wait after step GATE."""
        (self.folder / "open").touch()

    def outputs(self) -> str:
        return "\n".join(command.output for command in self.commands)

    def end(self) -> Run:
        """Return the run when it is over, as the head's disk has it."""
        code = self.head.end()
        weights = self.folder / "weights.json"
        (self.head.folder / "weights.json").write_text(weights.read_text() if weights.exists() else "[]")
        return Run(self.head.folder, code, self.outputs())


@contextlib.contextmanager
def spread(folder: Path, head: NamespaceHost, **options: Any) -> Iterator[Spread]:
    """A job whose commands do not outlive this."""
    job = Spread(folder, head, **options)
    try:
        yield job
    finally:
        for command in job.commands:
            command.process.kill()
            command.process.wait()


def shared(folder: Path, **fields: Any) -> dict[str, Any]:
    """The run's directory is on a disk that the hosts share."""
    return {"run_dir": str(folder / "east" / "run"), **fields}


def outcome(job: Spread) -> Run:
    """The run, which another host than the first one has led to its end."""
    (job.head.folder / "weights.json").write_text((job.folder / "weights.json").read_text())
    return Run(job.head.folder, 0, job.outputs())


def until(is_so: Callable[[], bool], command: Command, otherwise: str) -> None:
    """Return when it is so; fail when the command has ended, or after LIMIT_S, with what it had said."""
    deadline = time.monotonic() + LIMIT_S
    while not is_so():
        if time.monotonic() > deadline or command.process.poll() is not None:
            raise AssertionError(f"{otherwise}. Host {command.folder.name} said:\n{command.output[-3000:]}")
        time.sleep(0.02)
