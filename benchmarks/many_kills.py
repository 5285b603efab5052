"""200 random kills in one run of 4 workers: the losses of all its steps against those of an undisturbed run.

    python benchmarks/many_kills.py [--kills 200] [--cases norms:fp64,smooth:fp32] [--rules spared,wild]

A random worker gets SIGKILL at a random moment, and so on, without waiting for its replacement. By two rules:

    spared    at the moment of each kill another worker has the run's state: no committed step is lost, no worker
    restarts wild      no worker is spared. Where the last worker that had the state is hit, the run ends and says that
    the same
              command goes on from the newest checkpoint (one every 50 steps): it does, and takes those steps again

Each is compared with an undisturbed run of 4. Other numbers of workers add in another order, which rounds
differently, and training may let such differences grow. How much it does is told by the last column: an undisturbed run
of 3 workers against that of 4. A case is a model of programs/elastic_work.py and a precision: in fp32 "norms" lets them
grow and "smooth" does not.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import tempfile
import time
from pathlib import Path

from driving.options import options_of
from driving.progress import doing
from driving.runs import Difference, Run, Stand, compared, losses_of

WORKERS, OTHERS = 4, 3
SAVE_EVERY = 50
RULES = ("spared", "wild")
TARGET = 1e-5
LOOK_S = 0.001
LIMIT_S = 180.0  # from one kill to the next, with a restart in between


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Killed:
    """A run that was struck, and is over."""

    run: Run
    kills: int
    newcomers: int  # of the killed, had not yet committed a step of their own
    pairs: int  # came before the replacement of the one before had committed a step

    @property
    def restarts(self) -> int:
        return len(self.run.exit_codes) - 1


def killed(folder: Path, case: str, rule: str, options: argparse.Namespace) -> Killed:
    """Run, and kill as often as asked for; then have it save and stop."""
    draw, (model, precision) = random.Random(f"{options.seed} {case} {rule}"), case.split(":")
    words = ["--save-every", str(SAVE_EVERY), "--max-steps", str(10**9)]
    run = Run(folder, replicas=f"1-{WORKERS}", workers=WORKERS, precision=precision, model=model, options=words)
    kills, newcomers, pairs, told_of = 0, 0, 0, 0
    with run.ended():
        run.start()
        run.wait_until(lambda: len(holders(run.stands())) == WORKERS, "all workers")
        due = time.monotonic()
        while kills < options.kills:
            time.sleep(LOOK_S)
            if time.monotonic() > due + LIMIT_S:
                raise SystemExit(f"no worker can be killed for {LIMIT_S:.0f} s: the run hangs\n{run.last_words()}")
            if run.go_on():
                print(f"{case}, {rule}: ended with {run.exit_codes[-1]} after {kills} kills; it goes on", flush=True)
                continue
            stands = run.stands()
            victim = draw.choice(stands) if stands else None
            if time.monotonic() < due or victim is None or not may_go(victim, stands, rule):
                continue
            if run.kill(victim):
                kills += 1
                newcomers += victim.step == 0
                pairs += len(holders(stands)) < WORKERS
                due = time.monotonic() + draw.uniform(0, 2 * options.apart)
            if kills >= told_of + min(20, options.kills):
                told_of = kills
                print(f"{case}, {rule}: {kills} kills, step {run.step()}", flush=True)
        before = run.step()
        while run.go_on() or run.step() <= before or len(holders(run.stands())) < WORKERS:
            time.sleep(LOOK_S)  # the last one is recovered from, too
            if time.monotonic() > due + LIMIT_S:
                raise SystemExit(f"it does not recover within {LIMIT_S:.0f} s\n{run.last_words()}")
        run.stop()
    return Killed(run=run, kills=kills, newcomers=newcomers, pairs=pairs)


def holders(stands: list[Stand]) -> list[Stand]:
    return [stand for stand in stands if stand.holds_state]


def may_go(victim: Stand, stands: list[Stand], rule: str) -> bool:
    """Whether a rule allows that this one is killed now."""
    return rule == "wild" or any(stand.holds_state and stand.pid != victim.pid for stand in stands)


def undisturbed(folder: Path, case: str, workers: int, *, steps: int) -> Path:
    """The run directory of an undisturbed one."""
    words, (model, precision) = ["--max-steps", str(steps), "--no-save-at-end"], case.split(":")
    run = Run(folder, replicas=str(workers), workers=workers, precision=precision, model=model, options=words)
    doing(f"{case}: {steps} undisturbed steps of {workers} workers")
    with run.ended():
        run.start()
        if run.wait(limit_s=300 + steps) != 0:
            raise SystemExit(f"the undisturbed run has failed:\n{run.last_words()}")
    return run.run_dir


def row(case: str, rule: str, hit: Killed, found: Difference, floor: Difference) -> str:
    """A line of the table."""
    cells = [*case.split(":"), rule, f"{hit.kills} ({hit.newcomers}; {hit.pairs})", hit.restarts, found.num_steps]
    cells += [f"**{found.largest:.1e}**", f"{found.of_last:.1e}", found.verdict, f"{floor.largest:.1e}"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--cases", default="norms:fp64,smooth:fp32", help="models and precisions")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--apart", type=float, default=0.5, help="seconds between two kills, on the mean")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept (default: they are not)")
    options = options_of(parser, takes="about 15 minutes", quick={"kills": 5, "cases": "smooth:fp32"})
    rows, misses = list[str](), list[str]()
    with tempfile.TemporaryDirectory(prefix="paceline-many-kills-") as scratch:
        for case in options.cases.split(","):
            for rule in options.rules.split(","):
                folder = (options.folder or Path(scratch)) / f"{case.replace(':', '_')}_{rule}"
                hit = killed(folder / "hit", case, rule, options)
                steps = max(losses_of(hit.run.run_dir))
                plain = undisturbed(folder / "plain", case, WORKERS, steps=steps)
                other = undisturbed(folder / "other", case, OTHERS, steps=steps)
                found, floor = compared(hit.run.run_dir, plain), compared(other, plain, judged=False)
                rows.append(row(case, rule, hit, found, floor))
                print(rows[-1], flush=True)
                if found.largest > TARGET or not found.is_clean:
                    misses.append(f"{case}, {rule}: {found}")
    print(
        "\n| model | precision | rule | kills (of newcomers; while others were missing) | restarts | steps "
        "| largest relative difference of a loss | of the last one | audit | undisturbed, 3 workers against 4 |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|\n" + "\n".join(rows))
    if misses:
        raise SystemExit("the target is missed: " + "; ".join(misses))


if __name__ == "__main__":
    main()
