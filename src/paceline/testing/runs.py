"""Runs a training program under a programme of faults, to its end, and reports what became of it.

The program runs as a user would run it, by `paceline run`, in processes of its own, within a time limit. What a worker
cannot do to itself is done here: cutting the cable between two hosts, filling the disk, killing the whole run in the
middle of a save. Where the run ends with the advice to repeat the command, the same command is run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.checkpoint_dir import find
from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.environment import FAULTS, child_environment
from paceline.errors import LaunchError, PlanError
from paceline.launch.coordinator.restart_decision import WAITS
from paceline.plan import Plan
from paceline.testing import network_namespaces
from paceline.testing.disk import Disk, complete, mounted, tear
from paceline.testing.drill_folder import DrillFolder
from paceline.testing.faults import Fault, Programme
from paceline.testing.report import Report, Start, read_report

__all__ = ["assert_unharmed", "run_with"]

MOST_STARTS = 3  # beyond one for each fault
LOOK_S = 0.01  # at a process, and at what it asks for
END_S = 10.0  # after SIGTERM
PORT = 29519  # of the coordinator, in a network of its own
OURS = ("program", "args", "run_dir", "hosts", "head", "token_file", "fresh")  # fields of the job that are set here

FUNCTION = """\
import pathlib, cloudpickle, paceline
if __name__ == "__main__":
    function = pathlib.Path(__file__).with_name("function.pkl")
    paceline.run(cloudpickle.loads(function.read_bytes()))
"""


def run_with(
    faults: Programme | Fault | str | Iterable[Fault],
    program: Path | str | Callable[[Any], Any],
    *,
    folder: Path | None = None,
    args: Sequence[str] = (),
    plan: Plan | str | None = None,
    overrides: Sequence[str] = (),
    limit_s: float = 120.0,
    **job: Any,
) -> Report:
    """Run a script, or a training function, and have the faults come; returns when it is over.

    `faults`: none make an undisturbed run. `folder`: an empty one, or one to be made (default: a temporary one, which
    is the caller's to remove). `plan`, `overrides` ("plan.layout.replicas=1-4") and `job` (fields of Job: workers,
    max_steps, save_every, ...) are as for `paceline run`. A run that is not over after `limit_s` is ended, and the
    report says so. Raises LaunchError where the program could not even be started.
    """
    taken = [name for name in job if name in OURS]
    if taken:
        raise PlanError(f"run_with() sets {', '.join(taken)} itself; leave that out (args=... are the script's own).")
    programme = Programme.of(faults)
    folder = Path(tempfile.mkdtemp(prefix="paceline-run-")) if folder is None else folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    script = program if isinstance(program, (str, Path)) else _script_of(program, folder)
    words = ["--set=" + text for text in overrides]
    words += [f"--set={name}={_text(value)}" for name, value in job.items() if value is not None]
    if plan is not None:
        words.append(f"--plan={plan}")
    run = _Run(folder, programme, [str(script), *words], ["--", *args])
    run.to_its_end(time.monotonic() + limit_s)
    return run.report(like=str(plan or ""))


def assert_unharmed(report: Report, like: Report, *, tolerance: float | None = None) -> None:
    """Raise AssertionError, with a sentence for each, where promises were not kept: in a run under faults all of them
    came, it ended well, no committed step was lost (but for a restart from a checkpoint), each step has the loss of the
    undisturbed run `like`, as far as the plan promises that, and every sample was used once."""
    broken = report.broken(like, tolerance=tolerance)
    if broken:
        what = str(report.programme) or "an undisturbed run"
        raise AssertionError(f"{what}:\n  " + "\n  ".join(broken) + f"\nsee {report.folder}")


@dataclasses.dataclass(frozen=True, slots=True)
class _FinishedStart:
    exit_code: int
    output: str
    is_late: bool


class _Run:
    """One run, through as many starts as it takes."""

    def __init__(self, folder: Path, programme: Programme, words: Sequence[str], args: Sequence[str]) -> None:
        self._folder, self._programme, self._words, self._args = folder, programme, words, args
        self._run_dir = folder / "run"
        self._checkpoints = self._run_dir / "checkpoints"
        self._how: list[str] = []
        self._starts: list[Start] = []
        self._notes: DrillFolder | None = None
        self._disk: Disk | None = None
        self._hosts: tuple[network_namespaces.NamespaceHost, network_namespaces.NamespaceHost] | None = None
        self._is_torn = False
        self._is_cut = False  # one host from the other, in this start

    def to_its_end(self, deadline: float) -> None:
        kinds = {fault.kind for fault in self._programme}
        with contextlib.ExitStack() as stack:
            if "cut" in kinds:
                self._connect_hosts(stack)
            if "full_disk" in kinds:
                self._disk = stack.enter_context(mounted(self._checkpoints))
                how = "a file system of its own is filled" if self._disk else "the write is refused (mount needs root)"
                self._how.append(f"full_disk: {how}")
            outside = (
                {"torn_checkpoint"} | ({"cut"} if self._hosts else set()) | ({"full_disk"} if self._disk else set())
            )
            self._notes = DrillFolder.begin(self._folder, self._programme, outside=outside)
            while len(self._starts) < MOST_STARTS + len(self._programme):
                step = find(self._checkpoints).step
                if self._is_torn:
                    step = self._tear()
                ended = self._start(deadline)
                self._starts.append(
                    Start(exit_code=ended.exit_code, output=ended.output, resumable_step=step, is_late=ended.is_late)
                )
                if not self._goes_on(ended):
                    return

    def report(self, *, like: str) -> Report:
        if self._notes is None or not (self._run_dir / "metrics.jsonl").exists():
            output = "".join(start.output for start in self._starts).strip()
            raise LaunchError(f"the program took no step, so there is nothing to drill. It said:\n{output}")
        return read_report(
            self._folder, self._run_dir, notes=self._notes, starts=self._starts, how=self._how, like=like
        )

    def _connect_hosts(self, stack: contextlib.ExitStack) -> None:
        """Two hosts, if they can be had; else connections are shut down."""
        reason = network_namespaces.refusal()
        if reason is None:
            try:
                self._hosts = stack.enter_context(network_namespaces.two_hosts(self._folder))
            except RuntimeError as error:
                reason = str(error)
        if reason is None:
            token = self._folder / "token"
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(16), encoding="utf-8")
            self._how.append("cut: the cable between two hosts of network namespaces is pulled, until the next start")
        else:
            self._how.append(f"cut: the worker's connections are shut down ({reason})")

    def _start(self, deadline: float) -> _FinishedStart:
        """Run the command once."""
        number = len(self._starts) + 1
        environment = child_environment(**{FAULTS: str(self._folder / "programme.json")})
        if self._hosts is not None:
            network_namespaces.mend(self._hosts[1])  # the same command goes on where its hosts reach each other
        with contextlib.ExitStack() as stack:
            processes: list[subprocess.Popen[bytes]] = []
            self._is_cut = False
            outputs = [self._folder / f"output_{number}.{end}" for end in ("near", "far")[: 2 if self._hosts else 1]]
            for output, host in zip(outputs, self._hosts or (None,), strict=True):
                processes.append(self._command_on(host, environment, output, stack))
            is_late = not self._watched(processes, deadline, lambda: self._restart_host(processes, outputs, stack))
            for cut_off in processes[1:]:
                cut_off.kill()  # it would wait for the coordinator for a while
        text = "".join(output.read_text(encoding="utf-8", errors="replace") for output in outputs)
        return _FinishedStart(processes[0].returncode, text, is_late)

    def _command_on(
        self,
        host: network_namespaces.NamespaceHost | None,
        environment: Mapping[str, str],
        output: Path,
        stack: contextlib.ExitStack,
    ) -> subprocess.Popen[bytes]:
        file = stack.enter_context(open(output, "ab"))  # noqa: SIM115  # the stack closes it
        process = subprocess.Popen(
            self._command(host),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        stack.callback(_ended, process)
        return process

    def _restart_host(
        self, processes: list[subprocess.Popen[bytes]], outputs: Sequence[Path], stack: contextlib.ExitStack
    ) -> None:
        """Where the coordinator waits for a host in place of the one that was cut off, start that host again."""
        if self._hosts is None or not self._is_cut or WAITS.encode() not in outputs[0].read_bytes():
            return
        self._is_cut = False
        _kill_family(processes[1].pid)
        network_namespaces.mend(self._hosts[1])
        self._how.append("cut: the host that was cut off comes back when the other one waits for it")
        environment = child_environment(**{FAULTS: str(self._folder / "programme.json")})
        processes.append(self._command_on(self._hosts[1], environment, outputs[1], stack))

    def _command(self, host: network_namespaces.NamespaceHost | None) -> list[str]:
        command = [sys.executable, "-m", "paceline", "run", *self._words, f"--run-dir={self._run_dir}"]
        if host is not None and self._hosts is not None:
            head = f"{self._hosts[0].address}:{PORT}"
            token = self._folder / "token"
            command = [*host.prefix, *command, "--hosts=2", f"--head={head}", f"--token-file={token}"]
        return [*command, *self._args]

    def _watched(self, processes: Sequence[subprocess.Popen[bytes]], deadline: float, look: Callable[[], None]) -> bool:
        """Do what the run asks for until the first process (the coordinator) has ended; False: it takes too long."""
        while processes[0].poll() is None:
            if time.monotonic() > deadline:
                return False
            for number, deed in [] if self._notes is None else self._notes.asked():
                self._do(number, deed, processes)
            look()
            time.sleep(LOOK_S)
        return True

    def _do(self, number: int, deed: str, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        match deed:
            case "cut" if self._hosts is not None:
                network_namespaces.cut(self._hosts[1])
                self._is_cut = True
            case "fill" if self._disk is not None:
                self._disk.fill()
            case "empty" if self._disk is not None:
                self._disk.empty()
            case "tear":
                self._is_torn = True
                for process in processes:
                    _kill_family(process.pid)
            case _:
                raise ValueError(f"fault {number} asks for {deed!r}, which no process outside the run can carry out")
        if self._notes is not None:
            self._notes.done(number, deed)

    def _tear(self) -> int:
        """Tear the newest whole checkpoint, if there is another one; returns the step that is left."""
        self._is_torn = False
        whole = complete(self._checkpoints)
        if len(whole) > 1:
            torn = tear(whole.pop())
            self._how.append(f"torn_checkpoint: {torn.relative_to(self._run_dir)} was cut in half as well")
        else:
            self._how.append("torn_checkpoint: there was no second whole checkpoint, so none was cut")
        return int(whole[-1].name.removeprefix("step_")) if whole else 0

    def _goes_on(self, ended: _FinishedStart) -> bool:
        """Whether the same command is to be run again: because it says so, or because everything was killed."""
        if ended.is_late or ended.exit_code == 0:
            return False
        if ended.exit_code in (PREEMPTED, TOO_FEW) or self._is_torn:
            return True
        if self._notes is None or not (self._run_dir / "metrics.jsonl").exists():
            return False
        so_far = self.report(like="")
        losses = [
            fault for fault, when in zip(self._programme, so_far.came, strict=True) if when and fault.loses_a_worker
        ]
        return not so_far.is_elastic and len(self._starts) <= len(losses)


def _kill_family(pid: int) -> None:
    """Kill a supervisor and everything below it: workers whose supervisor alone is lost would save, and leave."""
    import psutil  # only where everything is to be killed

    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        for process in reversed(family):  # first of all the workers, of which one is waiting for this
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _ended(process: subprocess.Popen[bytes]) -> None:
    """End a run that still goes on, and all its processes: a worker may wait for a fault that nobody carries out."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            _kill_family(process.pid)
    process.wait()


def _script_of(function: Callable[[Any], Any], folder: Path) -> Path:
    """A script that runs a function of this process, whose module need not be importable elsewhere."""
    import cloudpickle  # only here: a drilled script never needs it

    module = sys.modules.get(function.__module__)
    by_value = module is not None and function.__module__ not in ("__main__", "builtins")
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        (folder / "function.pkl").write_bytes(cloudpickle.dumps(function))
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    path = folder / "program.py"
    path.write_text(FUNCTION, encoding="utf-8")
    return path


def _text(value: Any) -> str:
    """A job's value as the command reads it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
