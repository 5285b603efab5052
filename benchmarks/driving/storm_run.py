"""One storm: a run that is struck at its drawn steps, and started again by the command that the run itself prints.

The run has a folder, a temporary directory and shared memory of its own, so that what it leaves behind can be seen. All
its processes carry the folder's name in their environment: nothing else is ever struck.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from driving.progress import doing
from driving.runs import Stand, state_of, struck
from driving.storm_plans import EPOCHS, Fault, StormPlan
from paceline.checkpoint.checkpoint_dir import find
from paceline.launch.fork.process_lifetime import pids_with_variable, set_parent_death_signal
from paceline.sync.parameter_server.server_process import NAME as SERVER
from paceline.testing.disk import Disk, mounted

__all__ = ["MARK", "SAVE_EVERY", "SILENCE_S", "StandStill", "Start", "Storm"]

PROGRAM = Path(__file__).parents[1] / "programs" / "storm_work.py"
MARK = "STORM_FOLDER"  # environment variable of all processes of a storm
SAVE_EVERY, SILENCE_S, GRACE_S = 10, 5.0, 15.0
PAUSE_S = 0.015  # of each step, so that faults come in the middle of a run
LOOK_S = 0.004
REFUSED = 2  # exit status: the command cannot work
STAND_STILL_S = 120.0  # without a new step: longer than every limit of the job together
AGAIN = re.compile(r"go on with: (.*)$", re.MULTILINE)
OWN_MEMORY = 'mount --bind "$0" /dev/shm && exec "$@"'


class StandStill(Exception):
    """The run comes no further."""


@dataclasses.dataclass(kw_only=True)
class Start:
    """One start of the command, under way or over."""

    number: int
    output: Path
    saved_before: int  # the step of the newest checkpoint at this start
    faults: list[Fault] = dataclasses.field(default_factory=list[Fault])  # that came in it
    furthest: int = 0  # step that a worker has committed
    exit_code: int | None = None
    saved: int = 0  # the same as saved_before, at its end

    def says(self) -> str:
        return self.output.read_text(errors="replace")


class Storm:
    """A run under faults."""

    def __init__(self, folder: Path, plan: StormPlan, faults: list[Fault]) -> None:
        self.folder, self.plan, self.faults = folder, plan, faults
        for name in ("runs", "tmp", "shm"):
            (folder / name).mkdir(parents=True)
        self.starts: list[Start] = []
        self.came: list[Fault] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = set[int]()
        self._paused = dict[int, float]()  # processes, and when they go on
        self._disk: Disk | None = None
        self._ends = dict[str, float]()  # of what lasts for a while: "full disk", "slow disk"
        self._moved_at = time.monotonic()
        self._draw = random.Random(str(faults))

    # The whole.

    def to_its_end(self) -> None:
        """Run, strike, start again, until the command ends with 0; StandStill where it does not come so far."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._end_all)
            if any(fault.kind == "full disk" for fault in self.faults):
                self._disk = stack.enter_context(mounted(self.folder / "runs"))
            self._start()
            for fault in self.faults:
                self._until(lambda fault=fault: self._step() >= fault.step)
                self._rest(fault.after_s)
                if self.is_over():
                    return
                self._note(fault)
                self._strike(fault)
            while not self.is_over():
                self._look()
                time.sleep(LOOK_S)
            self._undo(at=float("inf"))

    def is_over(self) -> bool:
        """Whether the last start has ended with 0; one that has ended otherwise is started again."""
        if self._started().poll() is None:
            return False
        start = self.starts[-1]
        if start.exit_code is None:
            start.exit_code, start.saved = self._started().returncode, find(self.run_dir / "checkpoints").step
        if start.exit_code == 0:
            return True
        if len(self.starts) > 2 * len(self.faults) + 3 or start.exit_code == REFUSED:
            raise StandStill(f"it was started {len(self.starts)} times: {self.last_words()}")
        self._undo(at=float("inf"))  # a user makes room before starting again
        self._start()
        return False

    @property
    def run_dir(self) -> Path:
        found = sorted((self.folder / "runs").glob("*"))
        return found[-1] if found else self.folder / "runs" / "none"

    def pids(self) -> list[int]:
        """All processes of the storm."""
        return pids_with_variable(MARK, str(self.folder))

    def last_words(self) -> str:
        return self.starts[-1].says()[-1500:]

    # Its command.

    def _start(self) -> None:
        for stand in self.folder.glob("stand_*"):
            stand.unlink()
        said = AGAIN.findall(self.starts[-1].says()) if self.starts else []
        command = said[-1] if said else shlex.join(self._command())
        number = len(self.starts) + 1
        output = self.folder / f"output_{number}"
        self.starts.append(Start(number=number, output=output, saved_before=find(self.run_dir / "checkpoints").step))
        own = ["unshare", "--mount", "sh", "-c", OWN_MEMORY, str(self.folder / "shm")] if os.geteuid() == 0 else []
        with open(output, "wb") as file:
            file.write(f"$ {command}\n".encode())
            file.flush()
            self._process = subprocess.Popen(
                [*own, "sh", "-c", f"exec {command}"],
                env={
                    **os.environ,
                    "OMP_NUM_THREADS": "1",
                    "TMPDIR": str(self.folder / "tmp"),
                    MARK: str(self.folder),
                },
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_the_driver,
            )
        self._moved_at = time.monotonic()

    def _command(self) -> list[str]:
        """The command as its user types it: with the run's directory, where there is one already."""
        words = ["--plan", str(self.plan.plan), "--workers", str(self.plan.workers), "--no-tensorboard", "--threads=1"]
        words += [f"--save-every={SAVE_EVERY}", f"--silence-s={SILENCE_S:g}", f"--grace-s={GRACE_S:g}"]
        if self.run_dir.exists():
            words += ["--run-dir", str(self.run_dir.relative_to(self.folder))]
        loaders = int(any(fault.kind.startswith("loader") for fault in self.faults))
        args = [str(self.folder), self.plan.model, str(EPOCHS), str(PAUSE_S), str(loaders)]
        return [sys.executable, "-m", "paceline", "run", str(PROGRAM), *words, "--", *args]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the run was not started")
        return self._process

    def _end_all(self) -> None:
        self._undo(at=float("inf"))
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    # Where it stands.

    def _until(self, holds: Callable[[], bool], *, limit_s: float = float("inf")) -> bool:
        """Look until something is so, or the run is over; False after `limit_s`."""
        deadline = time.monotonic() + limit_s
        while not self.is_over() and not holds():
            if time.monotonic() > deadline:
                return False
            self._look()
            time.sleep(LOOK_S)
        return True

    def _rest(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._until(lambda: time.monotonic() >= deadline)

    def _look(self) -> None:
        """Note how far it has come, and end what lasts only for a while."""
        step, start = self._step(), self.starts[-1]
        if step > start.furthest:
            start.furthest, self._moved_at = step, time.monotonic()
        if time.monotonic() > self._moved_at + STAND_STILL_S:
            raise StandStill(f"no new step for {STAND_STILL_S:.0f} s: {self.last_words()}")
        self._undo(at=time.monotonic())

    def _step(self) -> int:
        return max((stand.step for stand in self._stands()), default=0)

    def _stands(self) -> list[Stand]:
        found: list[Stand] = []
        for path in sorted(self.folder.glob("stand_*")):
            words = path.read_text().split()
            if len(words) != 2 or int(words[0]) in self._killed or (state := state_of(int(words[0]))) is None:
                continue
            rank = int(path.name.removeprefix("stand_"))
            found.append(Stand(rank=rank, pid=int(words[0]), step=int(words[1]), is_stopped=state == "T"))
        return found

    # Its faults.

    def _note(self, fault: Fault) -> None:
        doing(f"{self.plan.name}: {fault}")
        self.came.append(fault)
        self.starts[-1].faults.append(fault)

    def _strike(self, fault: Fault) -> None:
        getattr(self, "_" + fault.kind.lower().replace(" ", "_").replace("-", "_"))(fault)

    def _victim(self, fault: Fault, *, spare: int | None = None) -> Stand | None:
        stands = [stand for stand in self._stands() if stand.pid != spare]
        return stands[int(fault.victim * len(stands))] if stands else None

    def _hit(self, pid: int | None, signum: int) -> None:
        """Send a signal to a process of this storm, and to no other one."""
        with contextlib.suppress(OSError):
            if pid is not None and f"{MARK}={self.folder}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
                if signum == signal.SIGKILL:
                    self._killed.add(pid)
                struck(pid, signum)

    def _kill(self, fault: Fault, *, spare: int | None = None) -> int | None:
        victim = self._victim(fault, spare=spare)
        if victim is not None:
            self._hit(victim.pid, signal.SIGKILL)
        return None if victim is None else victim.pid

    def _kill_two(self, fault: Fault) -> None:
        self._kill(fault)
        self._kill(fault)

    def _kill_again(self, fault: Fault) -> None:
        self._kill(fault)
        self._rest(fault.lasts_s / 3)
        self._kill(fault)

    def _kill_at_start(self, fault: Fault) -> None:
        self._kill(fault)
        newcomers: list[Stand] = []

        def has_come() -> bool:
            newcomers[:] = [stand for stand in self._stands() if stand.step == 0]
            return bool(newcomers)

        self._until(has_come, limit_s=30.0)
        if newcomers:
            self.starts[-1].faults.append(fault)
            self._hit(newcomers[0].pid, signal.SIGKILL)

    def _kill_in_a_save(self, fault: Fault) -> None:
        checkpoints = self.run_dir / "checkpoints"
        before = set(checkpoints.glob("*.partial-*"))
        self._until(lambda: bool(set(checkpoints.glob("*.partial-*")) - before), limit_s=10.0)
        if fault not in self.starts[-1].faults:
            self.starts[-1].faults.append(fault)
        self._kill(fault)

    def _kill_all(self, fault: Fault) -> None:
        for stand in self._stands():
            self._hit(stand.pid, signal.SIGKILL)
        self._supervisor(fault)

    def _supervisor(self, _: Fault) -> None:
        self._hit(self._started().pid, signal.SIGKILL)

    def _warm_parent(self, _: Fault) -> None:
        workers = {stand.pid for stand in self._stands()}
        for pid in children_of(self._started().pid):
            if workers & set(children_of(pid)):
                self._hit(pid, signal.SIGKILL)

    def _notice(self, _: Fault) -> None:
        self._hit(self._started().pid, signal.SIGTERM)

    def _ctrl_c(self, _: Fault) -> None:
        self._hit(self._started().pid, signal.SIGINT)

    def _leave(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is not None:
            self._hit(victim.pid, signal.SIGTERM)

    def _pause(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is not None:
            self._stop(victim.pid, fault.lasts_s)

    def _long_pause(self, fault: Fault) -> None:
        victim = self._victim(fault)
        if victim is not None:
            self._stop(victim.pid, SILENCE_S + 2 * fault.lasts_s)

    def _supervisor_paused(self, fault: Fault) -> None:
        self._stop(self._started().pid, fault.lasts_s if fault.victim < 0.5 else SILENCE_S + fault.lasts_s)

    def _stop(self, pid: int, seconds: float) -> None:
        self._paused[pid] = time.monotonic() + seconds
        self._hit(pid, signal.SIGSTOP)

    def _full_disk(self, fault: Fault) -> None:
        if self._disk is not None:
            self._disk.fill()
            self._ends["full disk"] = time.monotonic() + fault.lasts_s

    def _slow_disk(self, fault: Fault) -> None:
        (self.folder / "slow_disk").touch()
        self._ends["slow disk"] = time.monotonic() + 2 * fault.lasts_s

    def _loader_error(self, _: Fault) -> None:
        (self.folder / "loader_fault").touch()

    def _loader_killed(self, fault: Fault) -> None:
        victim = self._victim(fault)
        loaders = [] if victim is None else [pid for pid in children_of(victim.pid) if name_of(pid) != SERVER]
        if loaders:
            self._hit(loaders[0], signal.SIGKILL)

    def _server(self, fault: Fault) -> None:
        servers = [pid for stand in self._stands() for pid in children_of(stand.pid) if name_of(pid) == SERVER]
        if servers:
            self._hit(servers[int(fault.victim * len(servers))], signal.SIGKILL)

    def _undo(self, *, at: float) -> None:
        """End pauses and troubles of the disk whose time has come."""
        for pid in [pid for pid, end in self._paused.items() if end <= at]:
            del self._paused[pid]
            self._hit(pid, signal.SIGCONT)
        for name in [name for name, end in self._ends.items() if end <= at]:
            del self._ends[name]
            if name == "slow disk":
                (self.folder / "slow_disk").unlink(missing_ok=True)
            elif self._disk is not None:
                self._disk.empty()


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that are there."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _end_with_the_driver() -> None:
    set_parent_death_signal(signal.SIGKILL)
