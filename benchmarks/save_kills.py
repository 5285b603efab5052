"""50 kills at random instants of a checkpoint's save: does every resume go on from the newest committed one?

    python benchmarks/save_kills.py [--kills 50] [--kinds whole,one] [--seed 0]

    whole    a run of 2 workers is killed (its supervisor, its workers, or all of them) in the middle of a save, and the
             same command is started again, as often as asked for. Each start has to say that it goes on from the newest
             checkpoint whose mark is on the disk, and no save that was reported complete may be lost
    one      in an elastic run of 4 one worker is killed in the middle of a save, every second time the one that writes;
             the others go on, and what is on the disk has to be whole each time

The instant is drawn between the commit of the step that is saved and somewhat after the save is over, by the length of
the saves before; the table says where the kills have met it. In the end all losses are compared with those of a run
that nobody disturbs.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

from driving.options import options_of
from driving.progress import doing
from driving.runs import Difference, Run, compared, losses_of, state_of, struck
from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER, find
from paceline.events import CheckpointSaved, Event, WorkerStarted, decode

SAVE_EVERY = 24  # steps: more than pass while one is written
LONGER = 1.3  # than a save: the last instants are after it
LATEST = 7  # saves, whose lengths tell how long the next one may take
LIMIT_S = 60.0
TARGET = 1e-5
VICTIMS = ("the supervisor", "all workers", "supervisor and workers")
LOOK_S = 0.0005


@dataclasses.dataclass(kw_only=True)
class Counts:
    """What the kills of one kind have met, and what was wrong."""

    met: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    hit: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter[str])
    wrong: list[str] = dataclasses.field(default_factory=list[str])
    spans_s: list[float] = dataclasses.field(default_factory=list[float])  # of the saves that were left alone

    @property
    def kills(self) -> int:
        return sum(self.met.values())


def marked_step(checkpoints: Path) -> int:
    """The step of the newest committed checkpoint by the marks alone, without Paceline's reader; 0: there is none."""
    paths = [path for path in checkpoints.glob(f"step_*/{COMMIT_MARKER}") if ".removed-" not in path.parent.name]
    return max((json.loads(path.read_text())["step"] for path in paths), default=0)


def events_of(attempt: Path) -> list[Event]:
    """All that the workers of an attempt have said."""
    lines = [line for path in attempt.glob("worker_*/events.jsonl") for line in path.read_text().splitlines(True)]
    return [decode(line).event for line in lines if line.endswith("\n")]


def where(checkpoints: Path, step: int, before: set[str]) -> str:
    """How far the save of a step had come, by what it has left on the disk."""
    name = f"step_{step:08d}"
    if (checkpoints / name / COMMIT_MARKER).exists():
        left = any(".removed-" in path.name for path in checkpoints.iterdir())
        return "committed, older ones being deleted" if left else "committed, and over"
    for path in checkpoints.glob(f"{name}.partial-*"):
        if path.name not in before:
            return "committed, without its name" if (path / COMMIT_MARKER).exists() else "being written"
    return "before the first file"


def next_save(run: Run, counts: Counts, draw: random.Random) -> tuple[int, set[str]]:
    """Return at a random instant of a save that is yet to begin: its step, and what was on the disk before."""
    checkpoints = run.run_dir / "checkpoints"
    # Some saves are left alone before: the run comes on, and the length of a save is known. The first one of a process
    # takes longer than the others, since it imports what writes.
    for number in range(draw.randint(2, 3)):
        due, began = committed_save(run)
        run.wait_until(lambda due=due: (checkpoints / f"step_{due:08d}" / COMMIT_MARKER).exists(), "a save")
        if number > 0:
            counts.spans_s.append(time.monotonic() - began)
    span_s = statistics.median(counts.spans_s[-LATEST:])
    before = {path.name for path in checkpoints.glob("step_*")}
    due, began = committed_save(run)
    instant = began + draw.random() * LONGER * span_s
    while time.monotonic() < instant:
        time.sleep(LOOK_S)
    return due, before


def committed_save(run: Run) -> tuple[int, float]:
    """Wait for the commit of the next step that is to be saved; returns it, and when that was seen."""
    run.wait_until(lambda: run.step() > 0, "the first step", limit_s=LIMIT_S)
    due = (run.step() // SAVE_EVERY + 1) * SAVE_EVERY
    run.wait_until(lambda: run.step() >= due, f"step {due}", limit_s=LIMIT_S)
    return due, time.monotonic()


def kill_whole(run: Run, victims: str) -> None:
    """Kill all of a run, in one of three ways, and wait until nothing of it is left."""
    stands = run.stands()
    pids = [stand.pid for stand in stands]
    if victims != "the supervisor":
        for stand in stands:
            run.kill(stand)
    if victims != "all workers":
        struck(run.pid, signal.SIGKILL)
    run.wait(limit_s=LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while any(state_of(pid) is not None for pid in pids):
        if time.monotonic() > deadline:
            raise SystemExit(f"workers of a run that was killed are still there: {pids}")
        time.sleep(LOOK_S)


def resumes(folder: Path, options: argparse.Namespace) -> tuple[Run, Counts]:
    """Kill the whole run in the middle of saves, and look what each new start goes on from."""
    draw, counts = random.Random(f"{options.seed} whole"), Counts()
    run = Run(folder, replicas="2", workers=2, options=["--save-every", str(SAVE_EVERY), "--max-steps", str(10**9)])
    checkpoints, number = run.run_dir / "checkpoints", 1
    with run.ended():
        run.start()
        while counts.kills < options.kills:
            step, before = next_save(run, counts, draw)
            victims = draw.choice(VICTIMS)
            kill_whole(run, victims)
            counts.met[where(checkpoints, step, before)] += 1
            counts.hit[victims] += 1
            reported = [
                one.step for one in events_of(run.run_dir / f"attempt_{number}") if isinstance(one, CheckpointSaved)
            ]
            newest, number = marked_step(checkpoints), number + 1
            if newest < max(reported, default=0):
                counts.wrong.append(f"kill {counts.kills}: the save of step {max(reported)} was reported, and is lost")
            run.start()
            attempt = run.run_dir / f"attempt_{number}"
            run.wait_until(lambda attempt=attempt: len(started(attempt)) == 2, "the next start")
            if set(started(attempt)) != {newest}:
                counts.wrong.append(f"kill {counts.kills}: went on from {started(attempt)}, the newest is {newest}")
            if counts.kills % 10 == 0:
                print(f"whole: {counts.kills} kills, step {run.step()}, {dict(counts.met)}", flush=True)
        before_end = run.step()
        run.wait_until(lambda: run.step() > before_end + SAVE_EVERY, "some more steps")
        run.stop()
    return run, counts


def started(attempt: Path) -> list[int]:
    """What each worker of an attempt says it goes on from."""
    if not attempt.exists():
        return []
    return [one.resumed_from_step for one in events_of(attempt) if isinstance(one, WorkerStarted)]


def survivals(folder: Path, options: argparse.Namespace) -> tuple[Run, Counts]:
    """Kill single workers of an elastic run in the middle of saves."""
    draw, counts = random.Random(f"{options.seed} one"), Counts()
    words = ["--save-every", str(SAVE_EVERY), "--max-steps", str(10**9)]
    run = Run(folder, replicas="1-4", workers=4, options=words)
    checkpoints = run.run_dir / "checkpoints"

    def is_complete() -> bool:
        return sum(stand.holds_state for stand in run.stands()) == 4

    with run.ended():
        run.start()
        while counts.kills < options.kills:
            run.wait_until(is_complete, "all workers", limit_s=LIMIT_S)
            step, before = next_save(run, counts, draw)
            writes = counts.kills % 2 == 0
            victims = [stand for stand in run.stands() if (stand.rank == 0) == writes]
            if not victims or not run.kill(draw.choice(victims)):
                continue
            counts.met[where(checkpoints, step, before)] += 1
            counts.hit["worker 0, which writes" if writes else "another worker"] += 1
            found = find(checkpoints, verified=True)
            if found.step < marked_step(checkpoints) - SAVE_EVERY or found.newest is None:
                counts.wrong.append(f"kill {counts.kills}: the newest whole checkpoint is of step {found.step}")
            counts.wrong += [
                f"kill {counts.kills}: {path.name}: {reason}"
                for path, reason in found.skipped
                if ".partial-" not in path.name and ".removed-" not in path.name and path.exists()
            ]
            if counts.kills % 10 == 0:
                print(f"one: {counts.kills} kills, step {run.step()}, {dict(counts.met)}", flush=True)
        run.wait_until(is_complete, "all workers", limit_s=LIMIT_S)
        run.stop()
        if len(run.exit_codes) > 1:
            counts.wrong.append(f"the run was started {len(run.exit_codes)} times")
    return run, counts


KINDS = {"whole": resumes, "one": survivals}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: they are not)")
    options = options_of(parser, takes="about 10 minutes", quick={"kills": 2})
    rows, misses = list[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="paceline-save-kills-") as scratch:
        folder = options.folder or Path(scratch)
        for kind in options.kinds.split(","):
            doing(f"{kind}: {options.kills} kills")
            run, counts = KINDS[kind](folder / kind, options)
            steps = max(losses_of(run.run_dir))
            doing(f"{kind}: {steps} undisturbed steps")
            words = ["--max-steps", str(steps), "--no-save-at-end"]
            plain = Run(folder / f"{kind}_plain", replicas="2", workers=2, options=words)
            with plain.ended():
                plain.start()
                if plain.wait(limit_s=300 + steps) != 0:
                    raise SystemExit(f"the undisturbed run has failed:\n{plain.last_words()}")
            found = compared(run.run_dir, plain.run_dir)
            rows.append(row(kind, counts, found))
            misses += [f"{kind}: {text}" for text in counts.wrong]
            if found.largest > TARGET or not found.is_clean:
                misses.append(f"{kind}: {found}")
    print("\n| kind | kills | killed | the save was | wrong | steps | largest relative difference of a loss | audit |")
    print("|---|---|---|---|---|---|---|---|\n" + "\n".join(rows))
    if misses:
        raise SystemExit("the target is missed:\n" + "\n".join(misses))


def row(kind: str, counts: Counts, found: Difference) -> str:
    """A line of the table."""
    hit, met = (", ".join(f"{name}: {times}" for name, times in one.most_common()) for one in (counts.hit, counts.met))
    cells = [kind, counts.kills, hit, met, len(counts.wrong), found.num_steps, f"{found.largest:.1e}", found.verdict]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
