"""A run of `programs/elastic_work.py` that is watched, struck, started again where it says so, and judged in the
end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paceline.elastic.membership_messages import PREEMPTED, TOO_FEW
from paceline.launch.fork.process_lifetime import set_parent_death_signal
from paceline.monitor.audit.audit import audit

__all__ = ["Difference", "Run", "Stand", "compared", "losses_of", "state_of", "struck"]

PROGRAM = Path(__file__).parents[1] / "programs" / "elastic_work.py"
GOES_ON = (PREEMPTED, TOO_FEW)  # exit statuses after which the same command goes on
BATCH, MICRO = 48, 4
LOOK_S = 0.002
END_S = 60.0  # for a run that was asked to stop


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stand:
    """A worker's process that is there, and how far it has come."""

    rank: int
    pid: int
    step: int  # 0: it has committed none, so it may not have the run's state
    is_stopped: bool

    @property
    def holds_state(self) -> bool:
        return self.step > 0 and not self.is_stopped


def _end_with_the_driver() -> None:
    """In the command's process: when the process that drives it is killed, it ends, and the kernel kills its workers
    with it.
    """
    set_parent_death_signal(signal.SIGKILL)


class Run:
    """A run in a folder of its own, through as many starts as it takes."""

    def __init__(
        self,
        folder: Path,
        *,
        replicas: str = "4",
        workers: int = 4,
        precision: str = "fp64",
        pause_s: float = 0.0,
        model: str = "norms",
        options: Sequence[str] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run_dir = folder, folder / "run"
        plan = f"replicas={replicas}+batch(size={BATCH},micro={MICRO})+compute(precision={precision})"
        words = ["--plan", plan, "--workers", str(workers), "--run-dir", str(self.run_dir), "--no-tensorboard"]
        self._command = [sys.executable, "-m", "paceline", "run", str(PROGRAM), *words, *options]
        self._command += ["--", str(folder), model, str(pause_s)]
        self.exit_codes: list[int] = []  # of the starts that are over
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = set[int]()  # a process that was killed is to be seen for some more milliseconds

    # Its process.

    def start(self) -> None:
        """Start the command, or start it again."""
        for stand in self.folder.glob("stand_*"):
            stand.unlink()  # of processes that are gone
        with open(self.folder / f"output_{len(self.exit_codes) + 1}", "wb") as output:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_the_driver,
            )

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self._started().pid

    def is_over(self) -> bool:
        """Whether the command has ended; its exit status is noted."""
        process = self._started()
        if process.poll() is None:
            return False
        if len(self.exit_codes) < self._num_starts():
            self.exit_codes.append(process.returncode)
        return True

    def go_on(self) -> bool:
        """Start the command again if it has ended and says that it would go on; SystemExit where it has failed."""
        if not self.is_over():
            return False
        if self.exit_codes[-1] not in GOES_ON:
            raise SystemExit(f"the run has ended with {self.exit_codes[-1]}:\n{self.last_words()}")
        self.start()
        return True

    def wait(self, *, limit_s: float) -> int:
        """Wait for its end, and return its exit status; SystemExit where that takes too long."""
        deadline = time.monotonic() + limit_s
        while not self.is_over():
            if time.monotonic() > deadline:
                raise SystemExit(f"the run takes more than {limit_s:.0f} s:\n{self.last_words()}")
            time.sleep(LOOK_S)
        return self.exit_codes[-1]

    def wait_until(self, holds: Callable[[], bool], what: str, *, limit_s: float = 60.0) -> None:
        """Look until something is true; SystemExit where the run ends before, or that takes too long."""
        deadline = time.monotonic() + limit_s
        while not holds():
            if self.is_over() or time.monotonic() > deadline:
                raise SystemExit(f"waiting for {what}: the run has ended, or takes too long:\n{self.last_words()}")
            time.sleep(LOOK_S)

    def stop(self) -> int:
        """Have everybody save and leave; returns the exit status."""
        if not self.is_over():
            os.kill(self.pid, signal.SIGTERM)
        return self.wait(limit_s=END_S)

    @contextlib.contextmanager
    def ended(self) -> Iterator[Run]:
        """End it afterwards, whatever happens in between."""
        try:
            yield self
        finally:
            process = self._process
            if process is not None and process.poll() is None:
                process.kill()  # the kernel kills the workers with it
                process.wait()

    def last_words(self) -> str:
        return (self.folder / f"output_{self._num_starts()}").read_text(errors="replace")[-3000:]

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the run was not started")
        return self._process

    def _num_starts(self) -> int:
        return len(list(self.folder.glob("output_*")))

    # Its workers.

    def stands(self) -> list[Stand]:
        """The workers that are there now, by rank."""
        found: list[Stand] = []
        for path in sorted(self.folder.glob("stand_*")):
            words = path.read_text().split()
            if len(words) != 2 or int(words[0]) in self._killed or (state := state_of(int(words[0]))) is None:
                continue
            rank = int(path.name.removeprefix("stand_"))
            found.append(Stand(rank=rank, pid=int(words[0]), step=int(words[1]), is_stopped=state == "T"))
        return found

    def kill(self, stand: Stand) -> bool:
        """Kill a worker; False where it is gone already."""
        self._killed.add(stand.pid)
        return struck(stand.pid, signal.SIGKILL)

    def step(self) -> int:
        """The newest step that a worker that is there has committed."""
        return max((stand.step for stand in self.stands()), default=0)


def state_of(pid: int) -> str | None:
    """The state of a process, a letter as in proc(5); None: it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state = text.rpartition(")")[2].split()[0]
    return None if state in "ZX" else state


def struck(pid: int, signum: int) -> bool:
    """Send a signal; False where the process is gone."""
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return False
    return True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How a run that was disturbed compares with one that was not."""

    num_steps: int
    largest: float  # relative difference of a step's loss
    at_step: int
    of_last: float  # the same of the last step
    verdict: str  # of the audit

    @property
    def is_clean(self) -> bool:
        """Whether the audit has found nothing wrong; a run of less than an epoch has nothing to prove yet."""
        return self.verdict != "not clean"


def losses_of(run_dir: Path) -> dict[int, float]:
    """The loss of each committed step; of one that was taken again after a restart the newer one."""
    with open(run_dir / "metrics.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return {row["step"]: row["loss"] for row in rows}


def compared(hit: Path, plain: Path, *, judged: bool = True) -> Difference:
    """Compare the run directory of a disturbed run with an undisturbed one's; SystemExit where steps are missing."""
    losses, expected = losses_of(hit), losses_of(plain)
    missing, extra = sorted(expected.keys() - losses), sorted(losses.keys() - expected)
    if missing or extra:
        raise SystemExit(f"the steps are not the same ones: missing {missing[:8]}, too many {extra[:8]}")
    by_step = {step: abs(losses[step] - loss) / abs(loss) for step, loss in expected.items()}
    worst, last = max(by_step, key=by_step.__getitem__), max(by_step)
    verdict = audit(hit).verdict if judged else ""
    return Difference(
        num_steps=len(by_step), largest=by_step[worst], at_step=worst, of_last=by_step[last], verdict=verdict
    )
