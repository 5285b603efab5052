"""A run whose workers come and go, for as long as you like, against an undisturbed one: the same losses, to rounding.

    python benchmarks/elastic_churn.py [--minutes 60] [--every 4] [--pause 0.05] [--seed 0]

Every few seconds one of: `kill -9` of a worker, of two at once, SIGTERM to one, SIGSTOP and (some time later) SIGCONT,
`paceline resize` to another number of replicas. One worker that has the run's state is always spared, as no process
could give it to the others otherwise; where the run ends all the same, and says so, the same command goes on.
Afterwards an undisturbed run takes as many steps, and all losses are compared. In fp64, so that rounding is far below
1e-5, and with the model "smooth" of programs/elastic_work.py: "norms" lets rounding grow tenfold every 1,000 steps,
kills or none, and an hour has tens of thousands.
"""

from __future__ import annotations

import argparse
import collections
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from driving.options import options_of
from driving.runs import Run, Stand, compared, losses_of, struck

MOST = 4
SILENCE_S = 2.0
MODEL = "smooth"
TARGET = 1e-5


class Fate:
    """What is done to the workers of a run, by chance."""

    def __init__(self, run: Run, draw: random.Random) -> None:
        self._run, self._draw = run, draw
        self.done: collections.Counter[str] = collections.Counter()
        self._wake: list[tuple[float, int]] = []  # when a stopped process is to go on
        self._target = MOST

    def strike(self) -> None:
        """Do one thing to the run."""
        deeds: dict[Callable[[], str], int] = {
            self._kill: 4,
            self._kill_two: 1,
            self._terminate: 2,
            self._stop: 1,
            self._resize: 4,
        }
        (deed,) = self._draw.choices(list(deeds), weights=list(deeds.values()))
        if name := deed():
            self.done[name] += 1

    def tick(self) -> None:
        """Have those go on whose time has come: some were given up before."""
        for when, pid in list(self._wake):
            if time.monotonic() >= when:
                self._wake.remove((when, pid))
                if struck(pid, signal.SIGCONT):
                    self.done["SIGCONT in time"] += 1

    def restarted(self) -> None:
        self._wake.clear()
        self._target = MOST

    def _victims(self) -> list[Stand]:
        """The workers that may be hit: all but one that surely has the state, in an order drawn by chance."""
        stands = self._run.stands()
        holders = [stand for stand in stands if stand.holds_state]
        if not holders:
            return []
        spared = self._draw.choice(holders)
        victims = [stand for stand in stands if stand.pid != spared.pid]
        self._draw.shuffle(victims)
        return victims

    def _kill(self) -> str:
        victims = self._victims()[:1]
        return "kill -9" if any(self._run.kill(stand) for stand in victims) else ""

    def _kill_two(self) -> str:
        victims = self._victims()[:2]
        return "kill -9 of two at once" if sum(self._run.kill(one) for one in victims) == 2 else ""

    def _terminate(self) -> str:
        victims = [stand for stand in self._victims() if stand.holds_state][:1]
        self._target = max(1, self._target - len(victims))
        return "SIGTERM" if any(struck(stand.pid, signal.SIGTERM) for stand in victims) else ""

    def _stop(self) -> str:
        for stand in self._victims()[:1]:
            if struck(stand.pid, signal.SIGSTOP):
                self._wake.append((time.monotonic() + self._draw.uniform(0.1, 2 * SILENCE_S), stand.pid))
                return "SIGSTOP"
        return ""

    def _resize(self) -> str:
        wanted = self._draw.choice([replicas for replicas in range(2, MOST + 1) if replicas != self._target])
        command = [sys.executable, "-m", "paceline", "resize", str(self._run.run_dir), str(wanted)]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60)
        if told.returncode != 0:
            return f"resize refused: {told.stderr.strip()[-80:]}"
        more, self._target = wanted > self._target, wanted
        return f"resize {'up' if more else 'down'}"


def disturbed(run: Run, options: argparse.Namespace) -> Fate:
    """Run, and strike, until the time is over; then have it save and stop."""
    draw = random.Random(options.seed)
    fate = Fate(run, draw)
    end, told_at = time.monotonic() + options.minutes * 60, time.monotonic() + 60
    run.start()
    due = time.monotonic() + 5
    while time.monotonic() < end:
        if run.go_on():
            print(f"it ended with {run.exit_codes[-1]}, and goes on", flush=True)
            fate.restarted()
        fate.tick()
        if time.monotonic() >= due:
            fate.strike()
            due = time.monotonic() + draw.uniform(0.25, 1.75) * options.every
        if time.monotonic() >= told_at:
            told_at += 60
            print(f"step {run.step()}, done: {dict(fate.done)}", flush=True)
        time.sleep(0.01)
    run.stop()
    return fate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--every", type=float, default=4.0, help="seconds between two strikes, on the mean")
    parser.add_argument("--pause", type=float, default=0.05, help="seconds that each step rests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: they are not)")
    options = options_of(parser, takes="about 4 minutes", quick={"minutes": 0.3})
    with tempfile.TemporaryDirectory(prefix="paceline-come-and-go-") as scratch:
        folder = options.folder or Path(scratch)
        words = ["--silence-s", str(SILENCE_S), "--save-every", "500"]
        hit = Run(folder / "hit", replicas=f"1-{MOST}", workers=MOST, model=MODEL, pause_s=options.pause, options=words)
        with hit.ended():
            fate = disturbed(hit, options)
            steps = max(losses_of(hit.run_dir))
        words = ["--max-steps", str(steps)]
        plain = Run(folder / "plain", replicas=str(MOST), workers=MOST, model=MODEL, options=words)
        print(f"an undisturbed run of {steps} steps begins", flush=True)
        with plain.ended():
            plain.start()
            if plain.wait(limit_s=600 + steps) != 0:
                raise SystemExit(f"the undisturbed run has failed:\n{plain.last_words()}")
        found = compared(hit.run_dir, plain.run_dir)
    restarts = len(hit.exit_codes) - 1
    print("\n| what was done | times |\n|---|---|")
    print("\n".join(f"| {name} | {times} |" for name, times in fate.done.most_common()))
    print(f"| started again (after {sorted(set(hit.exit_codes[:-1])) or 'none'}) | {restarts} |")
    print(
        "\n| minutes | steps | largest relative difference of a loss | of the last one | audit |\n|---|---|---|---|---|"
    )
    print(f"| {options.minutes:g} | {found.num_steps} | {found.largest:.1e} | {found.of_last:.1e} | {found.verdict} |")
    if found.largest > TARGET or not found.is_clean:
        raise SystemExit(f"the target ({TARGET:.0e}, a clean audit) is missed")


if __name__ == "__main__":
    main()
