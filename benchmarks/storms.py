"""Random faults in runs under many kinds of plan: is everything that is promised kept?

    python benchmarks/storms.py [--faults 300] [--seed 1] [--jobs 2] [--folder DIR]
    python benchmarks/storms.py --plan "tensor x stages" --seed 1007 --faults 0 --folder DIR   one storm again

A storm is one run of a small program (programs/storm_work.py) to its end, with three to six faults that its seed draws:
signals to workers, supervisor, warm parent, servers and loaders, a full or slow disk, a notice, several at once. Where
the run ends, it is started again by the command that it has printed. Afterwards is checked:

    the run has ended with 0, each start before it with a status that fits its faults, and a message that names one
    `paceline audit` proves that each sample of each epoch was used once
    each step has the loss of an undisturbed run, as far as the plan promises that
    each start went on from the newest checkpoint, and no step was lost where none may be
    the run never stood still, and left no process, shared memory, temporary file or half a checkpoint

Needs root for full disks and for looking at shared memory (its own mount namespace); else these are left out.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import itertools
import os
import shutil
import sys
import tempfile
import time
import traceback
from pathlib import Path

from driving.options import options_of
from driving.progress import doing
from driving.runs import losses_of
from driving.storm_judge import violations
from driving.storm_plans import FAULTS, PLANS, Fault, StormPlan, drawn
from driving.storm_run import StandStill, Storm

OWN_MOUNTS = "STORMS_OWN_MOUNTS"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """A storm that is over."""

    plan: StormPlan
    seed: int
    came: list[Fault]
    starts: int
    seconds: float
    violations: list[str]


def one_storm(root: Path, plan: StormPlan, seed: int, like: dict[int, float], kinds: tuple[str, ...]) -> Judged:
    """Run one, judge it, and remove it if it kept everything."""
    folder = root / f"{plan.name.replace(' ', '_')}_{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    doing(f"{plan.name}, seed {seed}")
    storm, began = Storm(folder, plan, drawn(plan, seed, kinds=kinds)), time.monotonic()
    try:
        storm.to_its_end()
        broken = violations(storm, like)
    except StandStill as error:
        broken = [f"stand-still: {error}"]
    except Exception:  # a judge that fails is a violation, too, and the sweep goes on
        broken = [f"the judge failed: {traceback.format_exc()[-1500:]}"]
    if not broken:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = time.monotonic() - began
    return Judged(plan=plan, seed=seed, came=storm.came, starts=len(storm.starts), seconds=seconds, violations=broken)


def undisturbed(root: Path, plan: StormPlan) -> dict[int, float]:
    """The losses of the plan without a fault."""
    folder = root / f"{plan.name.replace(' ', '_')}_undisturbed"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        doing(f"{plan.name}, undisturbed")
        storm = Storm(folder, plan, [])
        storm.to_its_end()
        broken = violations(storm, losses_of(storm.run_dir))
        if broken:
            raise SystemExit(f"the undisturbed run of {plan.name} is not clean: {'; '.join(broken)}")
        (folder / "done").touch()
    return losses_of(next(iter((folder / "runs").glob("*"))))


def told(judged: Judged) -> str:
    """What one storm has shown, in a line, and a line for each violation."""
    faults = ", ".join(map(str, judged.came))
    lines = [f"{judged.plan.name}, seed {judged.seed}: {judged.starts} starts, {judged.seconds:.0f} s: {faults}"]
    again = f'--plan "{judged.plan.name}" --seed {judged.seed}'
    return "\n".join([*lines, *(f"  VIOLATION ({again}): {text}" for text in judged.violations)])


def table(all_judged: list[Judged]) -> str:
    """Plans by faults, with how often each came; violations are in the last column."""
    names = [name for name in FAULTS if any(fault.kind == name for one in all_judged for fault in one.came)]
    lines = [f"| plan | storms | {' | '.join(names)} | faults | violations |", "|---" * (len(names) + 4) + "|"]
    total = collections.Counter[str]()
    for plan in PLANS.values():
        storms = [one for one in all_judged if one.plan is plan]
        if not storms:
            continue
        counts = collections.Counter(fault.kind for one in storms for fault in one.came)
        total += counts
        broken = sum(bool(one.violations) for one in storms)
        cells = [plan.name, len(storms), *(counts[name] or "" for name in names), counts.total(), broken]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    broken = sum(bool(one.violations) for one in all_judged)
    cells = ["all", len(all_judged), *(total[name] for name in names), total.total(), broken]
    return "\n".join([*lines, f"| {' | '.join(map(str, cells))} |"])


def all_storms(root: Path, options: argparse.Namespace) -> list[Judged]:
    """Storms over all plans in turn, until enough faults have come."""
    plans = [PLANS[name] for name in options.plan.split(";")] if options.plan else list(PLANS.values())
    kinds = tuple(filter(None, options.kinds.split(",")))
    done: list[Judged] = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        names = [plan.name for plan in plans]
        like = dict(zip(names, pool.map(lambda plan: undisturbed(root, plan), plans), strict=True))
        print(f"{len(plans)} undisturbed runs are there", flush=True)
        left = iter((plan, options.seed + turn) for turn in itertools.count() for plan in plans)
        one_only = bool(options.plan) and options.faults == 0
        under_way = set[concurrent.futures.Future[Judged]]()
        while True:
            enough = sum(len(one.came) for one in done) >= options.faults and not (one_only and not done)
            while len(under_way) < options.jobs and not enough and not (one_only and under_way):
                plan, seed = next(left)
                under_way.add(pool.submit(one_storm, root, plan, seed, like[plan.name], kinds))
            if not under_way:
                return done
            over, under_way = concurrent.futures.wait(under_way, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in over:
                done.append(future.result())
                print(told(done[-1]), flush=True)


def enter_own_mounts() -> None:
    """Go on in a mount namespace of its own: what is mounted here vanishes with this process."""
    if os.geteuid() == 0 and OWN_MOUNTS not in os.environ:
        words = ["unshare", "--mount", "--propagation", "private", sys.executable, *sys.argv]
        os.execvpe("unshare", words, {**os.environ, OWN_MOUNTS: "1"})


def main() -> None:
    enter_own_mounts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=300, help="until so many have come (0, with --plan: one storm)")
    parser.add_argument("--plan", default="", help=f"only these: {'; '.join(PLANS)}")
    parser.add_argument("--kinds", default="", help=f"only these: {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=1, help="of the first storm of each plan")
    parser.add_argument("--jobs", type=int, default=2, help="storms at a time")
    parser.add_argument("--folder", type=Path, help="where storms that broke something are kept (default: nowhere)")
    quick = {"faults": 3, "plan": "elastic"}
    options = options_of(parser, takes="about 25 minutes", quick=quick)
    with tempfile.TemporaryDirectory(prefix="paceline-storms-") as scratch:
        root = (options.folder or Path(scratch)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        done = all_storms(root, options)
    print("\n" + table(done))
    if broken := [one for one in done if one.violations]:
        raise SystemExit(f"{len(broken)} of {len(done)} storms have broken a promise")


if __name__ == "__main__":
    main()
