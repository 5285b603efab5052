"""How far the live page is behind a commit, and what serving it costs the training.

    python benchmarks/live_page.py [--pages 1 20] [--steps 300] [--blocks 20] [--block-s 20]

Behind: a run of one worker takes about ten steps a second. Pages listen as browsers do; of each step and page, the time
is taken from the commit, as the worker notes it, to the arrival of its row. Cost: a run of the demo model goes on, and
a page is open in every other block of seconds, in the order A B B A. Speeds of blocks are compared by their medians.
Speeds of blocks scatter by several per cent on most machines. So the kernel is asked, too, for how long the workers'
threads were ready and waited for a core (`schedstat`): what a page adds to that, it takes from the training. Seconds of
a core that the server and its reports used are counted as well; most of them come from pauses of the workers.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from driving.live_pages import Listener, cpu_s_of, metrics_rows, served, training, waited_s_of
from driving.options import options_of
from driving.progress import doing
from paceline.monitor.status.status import status

PAUSE_S = 0.095
LIMIT_S = 600.0
SETTLING_S = 2.0  # after a page was opened or closed
LOWEST_PRIORITY = 19


def delays_of(scratch: Path, *, pages: int, steps: int) -> list[float]:
    """Seconds from commit to arrival, of all steps and pages."""
    runs = scratch / f"behind-{pages}"
    runs.mkdir()
    with (
        training(runs / "run", workers=1, pause_s=PAUSE_S),
        served(runs) as (address, _),
        contextlib.ExitStack() as all_,
    ):
        listeners = [all_.enter_context(Listener(address, "run")) for _ in range(pages)]
        deadline = time.monotonic() + LIMIT_S
        while min(sum(when > 0 for when in one.arrived.values()) for one in listeners) < steps:
            failed = next((one.error for one in listeners if one.error is not None), None)
            if failed is not None or time.monotonic() > deadline:
                raise SystemExit(f"a page has ended, or the steps did not come: {failed}")
            time.sleep(0.5)
        committed = {row["step"]: row["time"] for row in metrics_rows(runs / "run")}
    return [when - committed[step] for one in listeners for step, when in one.arrived.items() if when > 0]


@dataclasses.dataclass(slots=True)
class Costs:
    """Of blocks without a page (False) and with one (True)."""

    speeds: dict[bool, list[float]]  # steps a second
    waits: dict[bool, list[float]]  # shares of the time that a worker was ready and waited for a core
    used: float  # the share of a core that serving took


def costs_of(scratch: Path, *, workers: int, blocks: int, block_s: float) -> Costs:
    """Measure blocks of seconds without a page and with one."""
    runs = scratch / "cost"
    runs.mkdir()
    spans: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    waits: dict[bool, list[float]] = {False: [], True: []}
    used_s = open_s = 0.0
    with training(runs / "run", workers=workers, pause_s=0.0), served(runs) as (address, pid):
        pids = [worker.pid for worker in status(runs / "run").workers]
        for number in range(2 * blocks):
            is_open = number % 4 in (1, 2)
            doing(f"block {number + 1} of {2 * blocks}, {'with a page' if is_open else 'without'}")
            with Listener(address, "run", reads=False) if is_open else contextlib.nullcontext():
                time.sleep(SETTLING_S)
                before_s, waited_s, began = cpu_s_of(pid), sum(map(waited_s_of, pids)), time.time()
                time.sleep(block_s)
                ended = time.time()
                waits[is_open].append((sum(map(waited_s_of, pids)) - waited_s) / (len(pids) * (ended - began)))
                spans[is_open].append((began, ended))
                if is_open:
                    used_s, open_s = used_s + cpu_s_of(pid) - before_s, open_s + ended - began
        times = [row["time"] for row in metrics_rows(runs / "run")]
    speeds = {is_open: [_speed(times, *span) for span in of] for is_open, of in spans.items()}
    return Costs(speeds=speeds, waits=waits, used=used_s / open_s)


def _speed(times: Sequence[float], began: float, ended: float) -> float:
    """Steps a second between the first and the last commit of a block."""
    within = [when for when in times if began <= when <= ended]
    if len(within) < 3:
        raise SystemExit(f"a block has {len(within)} steps: give it more time (--block-s)")
    return (len(within) - 1) / (within[-1] - within[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 20], help="that are open at the same time")
    parser.add_argument("--steps", type=int, default=300, help="whose way to the page is timed")
    parser.add_argument("--workers", type=int, default=2, help="of the run whose speed is compared")
    parser.add_argument("--blocks", type=int, default=20, help="with a page, and as many without")
    parser.add_argument("--block-s", type=float, default=20.0, help="seconds of a block")
    quick = {"steps": 30, "blocks": 2, "block_s": 4.0}
    options = options_of(parser, takes="about 17 minutes", quick=quick)
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)  # browsers are on other machines, mostly
    with tempfile.TemporaryDirectory(prefix="paceline-page-") as scratch:
        print("| pages | steps | behind a commit, median | 99 of 100 within | worst |\n|---:|---:|---:|---:|---:|")
        for pages in options.pages:
            doing(f"{options.steps} steps with {pages} pages")
            delays = sorted(delays_of(Path(scratch), pages=pages, steps=options.steps))
            late = delays[min(len(delays) - 1, round(0.99 * len(delays)))]
            print(
                f"| {pages} | {options.steps} | {statistics.median(delays):.2f} s | {late:.2f} s | {delays[-1]:.2f} s |"
            )
        costs = costs_of(Path(scratch), workers=options.workers, blocks=options.blocks, block_s=options.block_s)
    cores = os.cpu_count() or 1
    print("\n| | steps a second | | a worker waits for a core |\n|---|---:|---:|---:|")
    one, other = (statistics.median(costs.speeds[is_open]) for is_open in (False, True))
    waits, more = (statistics.median(costs.waits[is_open]) for is_open in (False, True))
    extent = f"blocks from {min(costs.speeds[False]):.3f} to {max(costs.speeds[False]):.3f}"
    print(f"| without a page | {one:.3f} | {extent} | {100 * waits:.3f} % of its time |")
    speed, wait = f"{100 * (other / one - 1):+.2f} %", f"{100 * more:.3f} %: {100 * (more - waits):+.3f} %"
    print(f"| with a page | {other:.3f} | {speed} | {wait} |")
    share = f"{100 * costs.used:.2f} % of a core | {100 * costs.used / cores:.2f} % of {cores} cores"
    print(f"| the server and its reports use | {share} | |")


if __name__ == "__main__":
    main()
