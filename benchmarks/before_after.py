"""This checkout against another commit, in one run: steps, overhead, start-up, recovery and all-reduce.

    python benchmarks/before_after.py [COMMIT] [--turns 12] [--pairs 7] [--kills 6] [--rounds 3] [--only step,start,...]

The other commit's sources are unpacked into a temporary folder, and both are measured alternately, A B B A ...:

    step        milliseconds of a step. Both jobs are started once and alternate in blocks, while the other stands still
    start       seconds from the command to the first committed step
    recovery    seconds from `kill -9` of one of 4 workers, as in `recovery.py`
    allreduce   each commit's own `allreduce.py` with 2 workers; what is compared is the ratio to gloo in the same run

Each line gives medians, and the median of the pairs' ratios with its middle half: 1.00x is as before.
"""

from __future__ import annotations

import argparse
import compileall
import dataclasses
import io
import os
import re
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import recovery
from driving.interleaved import Job, interleaved
from driving.options import options_of
from driving.progress import doing
from startup import first_step_s

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(__file__).parent / "programs"
KINDS = ("step", "start", "recovery", "allreduce")
SIZES = ("4 KB", "64 MB")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A program under Paceline whose steps are timed."""

    name: str
    program: str
    words: tuple[object, ...]  # the program's sizes; the number of steps and OUT follow
    workers: int = 2
    plan: str = ""
    words_after: tuple[object, ...] = ()  # between the number of steps and OUT


CASES = (
    Case(name="GPT, 2 workers", program="gpt", words=(128, 4, 4, 4)),
    Case(name="50 M parameters, 2 workers", program="wide", words=(2048, 12, 8)),
    Case(
        name="overhead: a GPT of one small layer, 1 worker",
        program="gpt",
        words=(16, 1, 1, 1),
        workers=1,
        plan="batch(size=1,micro=1)",
    ),
    Case(
        name="fully sharded, 2 workers",
        program="shard",
        words=(128, 4, 4, 4),
        plan="shard=2+batch(size=16,micro=4)",
        words_after=(2,),
    ),
)


def unpacked(commit: str, into: Path) -> Path:
    """Write the commit's files into a folder; exits where git does not know it."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True)
    if done.returncode:
        raise SystemExit(f"git knows no commit {commit!r}: {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(into, filter="data")
    return into


def use(tree: Path) -> None:
    """From now on processes that this one starts import `paceline` from there."""
    os.environ["PYTHONPATH"] = str(tree / "src")


def job_of(case: Case, tree: Path) -> Job:
    def command(steps: int, out: str) -> list[str]:
        start = ["env", f"PYTHONPATH={tree / 'src'}", sys.executable, "-m", "paceline", "run"]
        options = [
            "--workers",
            str(case.workers),
            "--run-dir",
            f"{out}_run",
            *(["--plan", case.plan] if case.plan else []),
        ]
        words = map(str, (*case.words, steps, *case.words_after))
        return [*start, str(PROGRAMS / f"{case.program}_paceline.py"), *options, "--", *words, out]

    return Job(command=command, workers=case.workers)


def line(name: str, unit: str, before: Sequence[float], now: Sequence[float], *, more_is_better: bool = False) -> str:
    """A row of the table; a ratio above 1 is always a loss."""
    pairs = [(b / a if not more_is_better else a / b) for a, b in zip(before, now, strict=True)]
    low, middle, high = statistics.quantiles(pairs) if len(pairs) > 1 else pairs * 3
    cells = [f"{statistics.median(times):.3g}" for times in (before, now)]
    return f"| {name}, {unit} | {' | '.join(cells)} | **{middle:.3f}x** ({low:.3f}x to {high:.3f}x) |"


def steps(trees: Sequence[Path], options: argparse.Namespace) -> None:
    for case in CASES[: options.cases]:
        took = interleaved([job_of(case, tree) for tree in trees], turns=options.turns, block=options.block)
        print(line(case.name, "ms per step", *took), flush=True)


def starts(trees: Sequence[Path], options: argparse.Namespace) -> None:
    for workers in (2, 8):
        took: dict[Path, list[float]] = {tree: [] for tree in trees}
        for pair in range(options.pairs):
            for tree in trees if pair % 2 == 0 else reversed(trees):
                doing(f"start-up of {workers} workers, pair {pair + 1} of {options.pairs}")
                use(tree)
                took[tree].append(first_step_s("paceline", workers))
        print(line(f"start-up of {workers} workers", "s", *took.values()), flush=True)


def recoveries(trees: Sequence[Path], options: argparse.Namespace) -> None:
    found: dict[Path, list[recovery.Incident]] = {tree: [] for tree in trees}
    settings = argparse.Namespace(seed=0, width=1536 if options.kills > 1 else 256, rate=0.01)
    for number in range(options.rounds):
        for tree in trees if number % 2 == 0 else reversed(trees):
            doing(f"{options.kills} kills, round {number + 1} of {options.rounds}")
            use(tree)
            found[tree] += recovery.incidents("paceline", settings, num=options.kills, is_shown=False)[1]
    for field, name in (("next_s", "kill to the next step"), ("replaced_s", "kill to the successor's first step")):
        print(line(name, "s", *([getattr(one, field) for one in ones] for ones in found.values())), flush=True)


def all_reduces(trees: Sequence[Path], options: argparse.Namespace) -> None:
    found: dict[Path, list[list[float]]] = {tree: [] for tree in trees}  # of each run: its ratios, in the table's order
    for number in range(options.rounds):
        for tree in trees if number % 2 == 0 else reversed(trees):
            doing(f"all-reduce, round {number + 1} of {options.rounds}")
            use(tree)
            command = [sys.executable, str(tree / "benchmarks" / "allreduce.py"), "--workers", "2"]
            done = subprocess.run([*command, "--sizes", ",".join(SIZES)], capture_output=True, text=True, timeout=900)
            ratios = [float(text) for text in re.findall(r"\*\*([0-9.e+-]+)x\*\*", done.stdout)]
            if done.returncode or len(ratios) != 2 * len(SIZES):
                raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
            found[tree].append(ratios)
    for place, name in enumerate(f"all-reduce of {size} {way}" for size in SIZES for way in ("in place", "copied")):
        before, now = ([ratios[place] for ratios in runs] for runs in found.values())
        print(line(name, "gloo's time by ours", before, now, more_is_better=True), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", default="HEAD~1", help="the other one, as git knows it (HEAD~1)")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--cases", type=int, default=len(CASES), help="of step: only the first so many programs")
    parser.add_argument("--block", type=int, default=12, help="steps of a turn")
    parser.add_argument("--pairs", type=int, default=7, help="of starts")
    parser.add_argument("--kills", type=int, default=6, help="of each round")
    parser.add_argument("--rounds", type=int, default=3, help="of kills, and of all-reduces")
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    quick = {"turns": 2, "block": 4, "pairs": 1, "kills": 1, "rounds": 1, "cases": 1, "only": "step"}
    options = options_of(parser, takes="about 15 minutes", quick=quick)
    kinds = options.only.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--only: {', '.join(unknown)} is not known; known are {', '.join(KINDS)}")
    with tempfile.TemporaryDirectory(prefix="paceline-before-") as folder:
        trees = [unpacked(options.commit, Path(folder)), ROOT]
        for tree in trees:  # or the one that was never imported would be compiled at each start
            compileall.compile_dir(tree / "src", quiet=2)
        print(f"| what | {options.commit} | now | now / then |\n|---|---|---|---|", flush=True)
        for kind, measure in zip(KINDS, (steps, starts, recoveries, all_reduces), strict=True):
            if kind in kinds:
                measure(trees, options)


if __name__ == "__main__":
    main()
