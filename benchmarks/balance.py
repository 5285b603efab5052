"""What `--balance` gains where one of two workers is slow: step times against even shares, and against the ideal.

    python benchmarks/balance.py [--slow 2,3] [--rounds 3] [--steps 60] [--width 1536]

The drill's own fault makes computing take worker 1 f times as long; nothing else is changed. Even shares and balanced
ones alternate, and medians are over the later steps of all rounds. The ideal gives each worker a share by its speed:
what is computed then takes 2 f / (f + 1) times as long as with two quick workers, instead of f times. So of the time
that the slow worker adds to even shares one part in f + 1 remains.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import tempfile
from pathlib import Path

from driving.options import options_of
from paceline.testing import Report, run_with

PROGRAM = Path(__file__).parent / "programs" / "recover_paceline.py"
WORKERS, BATCH, MICRO = 2, 128, 4
SETTLED = 30  # steps after which shares are as they will be: they are looked at every 10
TARGET = 1e-5


@dataclasses.dataclass(kw_only=True)
class Measured:
    """The later steps of all rounds in one setting."""

    seconds: list[float] = dataclasses.field(default_factory=list[float])
    shares: tuple[int, ...] = ()  # micro-batches of each worker in a step, in the last round
    losses: dict[int, float] = dataclasses.field(default_factory=dict[int, float])

    @property
    def step_s(self) -> float:
        return statistics.median(self.seconds)


def measure(into: Measured, options: argparse.Namespace, *, slow: float, is_balanced: bool) -> None:
    """Run once."""
    fault = f"slow:worker=1,step=1,times={slow},steps={options.steps}" if slow > 1 else ""
    with tempfile.TemporaryDirectory(prefix="paceline-balance-") as name:
        plan = f"replicas={WORKERS}+batch(size={BATCH},micro={MICRO})"
        settings = {"workers": WORKERS, "threads": 1, "max_steps": options.steps, "tensorboard": False}
        report = run_with(
            fault,
            PROGRAM,
            folder=Path(name) / "run",
            args=[name, str(options.width), "0.01"],
            plan=plan,
            limit_s=600,
            balance=is_balanced,
            save_at_end=False,
            **settings,
        )
        if report.exit_code != 0:
            raise SystemExit(f"a run has failed:\n{report.output[-3000:]}")
        rows = [json.loads(line) for line in (report.run_dir / "metrics.jsonl").read_text().splitlines()]
        when = [row["time"] for row in rows if row["step"] >= min(SETTLED, options.steps // 2)]
        into.seconds += [later - earlier for earlier, later in itertools.pairwise(when)]
        into.losses, into.shares = report.losses, shares_of_last_step(report)


def shares_of_last_step(report: Report) -> tuple[int, ...]:
    """Micro-batches that each worker ran in the last step, by their ledgers."""
    shares: list[int] = []
    for worker in range(WORKERS):
        lines = (report.run_dir / "attempt_1" / f"worker_{worker}" / "ledger.jsonl").read_text().splitlines()
        shares.append(sum(stop - start for start, stop in json.loads(lines[-1])["ranges"]) // MICRO)
    return tuple(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slow", default="2,3", help="times that computing takes worker 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=1536, help="of the model: makes the step longer")
    options = options_of(parser, takes="about 4 minutes", quick={"rounds": 1, "slow": "2", "steps": 20, "width": 512})
    slows = [float(text) for text in options.slow.split(",")]
    settings = [(1.0, False), *itertools.product(slows, (False, True))]
    found = {setting: Measured() for setting in settings}
    for number in range(options.rounds):
        for slow, is_balanced in settings if number % 2 == 0 else reversed(settings):
            into = found[slow, is_balanced]
            measure(into, options, slow=slow, is_balanced=is_balanced)
            print(f"{slow:g}x, {'balanced' if is_balanced else 'even'}: {into.step_s:.3f} s, {into.shares}", flush=True)
    plain = found[1.0, False]
    print(f"\nboth workers quick: {plain.step_s * 1e3:.1f} ms a step\n")
    print("| worker 1 takes | even shares, ms | `--balance`, ms | gain | shares | ideal, ms | of its gain | losses |")
    print("|---|---|---|---|---|---|---|---|")
    for slow in slows:
        even, balanced = found[slow, False], found[slow, True]
        ideal_s = plain.step_s + (even.step_s - plain.step_s) / (slow + 1)
        reached = (even.step_s - balanced.step_s) / (even.step_s - ideal_s)
        largest = max(abs(balanced.losses[step] - loss) / abs(loss) for step, loss in plain.losses.items())
        cells = [f"{slow:g}x as long", f"{even.step_s * 1e3:.1f}", f"{balanced.step_s * 1e3:.1f}"]
        cells += [f"**{even.step_s / balanced.step_s:.2f}x**", " : ".join(map(str, balanced.shares))]
        print(f"| {' | '.join(cells)} | {ideal_s * 1e3:.1f} | {reached:.0%} | {largest:.0e} apart |")
        if largest > TARGET:
            raise SystemExit(f"the losses differ by {largest:.1e}: shares may not change what is learned")


if __name__ == "__main__":
    main()
