"""Four far sites: how long each sync and wire takes to a held-out loss there and on an unlimited network, beside DDP.

    python benchmarks/sites.py [--syncs TEXT ...] [--wires TEXT ...] [--links 0:0 100:50 20:50] [--seconds 45]
                               [--batch 128] [--target 2.3] [--rounds 3] [--out runs/sites.json]

The sites are network namespaces, one worker of one thread on each (`paceline.testing.sites`); a link is Mbit/s of each
site's cable and milliseconds from one site to another, one way; 0:0 has no limit. All train `examples/gpt.py`'s GPT on
the same samples; DDP's on gloo are started by torchrun. Time counts from the first step, without start-up.

On the first link every plan runs until the loss is met. On the others it runs for so many `--seconds`; where they do
not suffice, the table has the steps that it needed on the first link times the time of one, as "~": the loss by step is
the same; ">" is what was not met in time. Of plans that agree in rounds, two whole ones are needed to know that. Plans
that Paceline refuses, and those whose replicas do not wait for each other, are left out, with the reason.

A machine that others use, too, may be a third slower when a later plan runs. So the best plan of each link is timed
again at the end, in turns with the others' and in so many `--rounds`: the median of its steps' times, and the steps
that it needs, say how many times as long it takes on a slow link as the best one on the first.

All that was measured is kept in `--out`, and not measured again: the matrix can be filled in several calls. Remove the
file to begin anew; `benchmarks/sites_curves.py` draws it. A plan takes about two minutes on the first link and one
minute on each other one. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from driving.courses import DDP, ROUND, UNLIMITED, Matrix, Task, by_chance, link_name, shown_plan
from driving.options import options_of
from driving.site_runs import Failed, course
from paceline.errors import PlanError
from paceline.plan import Plan
from paceline.testing.network_namespaces import NamespaceHost
from paceline.testing.sites import refusal, sites

SITES = 4
SYNCS = (
    "allreduce",
    "localsgd(every=8)",
    "localsgd(every=16)",
    "localsgd(every=16,outer=nesterov)",
    "localsgd(every=16,fragments=2,overlap=4)",
    "localsgd(every=8,overlap=1,keep_moves=true)",
    "gossip(peers=ring)",
    "parameterserver",
)
WIRES = ("raw", "cast(dtype=bf16)", "int8", "onebit", "topk(ratio=0.01)", "powersgd(rank=4)")
LINKS = (UNLIMITED, "100:50", "20:50")
AIM = 1.3  # the best on a slow network may take so many times the best on an unlimited one


def possible(syncs: Sequence[str], wires: Sequence[str], task: Task) -> Iterator[str]:
    """Every sync with every wire that Paceline takes on these workers; says of the others why not."""
    batch = f"batch(size={task.batch},micro={task.batch // SITES})"
    for sync in syncs:
        for wire in wires:
            text = f"{sync}+{wire}"
            if by_chance(text):
                print(f"left out, {text}: its replicas are not at the same step when the program measures all of them")
                continue
            try:
                Plan.parse(f"{text}+{batch}").require(workers=SITES)
            except PlanError as error:
                print(f"left out, {text}: {error}")
                continue
            yield text


def made_sites(link: str, folder: Path) -> contextlib.AbstractContextManager[list[NamespaceHost]]:
    """The sites, with this link between them."""
    mbit, ms = map(float, link.split(":"))
    return sites(folder, count=SITES, bits_per_s=mbit * 1e6, delay_s=ms / 1e3)


def measure(matrix: Matrix, plans: Sequence[str], link: str, *, limit_s: float, out: Path) -> None:
    """Run each plan on sites with this link, and keep what it did; says of those that fail why."""
    task = matrix.task
    batch = f"+batch(size={task.batch},micro={task.batch // SITES})"
    with tempfile.TemporaryDirectory() as folder, made_sites(link, Path(folder)) as hosts:
        for plan in plans:
            try:
                one = course(hosts, plan if plan == DDP else plan + batch, task, limit_s=limit_s)
            except Failed as error:
                print(f"{link_name(link)}, {plan} failed: {error}")
                continue
            is_short = one.last_step < 2 * ROUND and one.steps_to(task.target) is None
            if plan.startswith("localsgd") and is_short:
                print(f"{link_name(link)}, {plan}: only {one.last_step} steps; two rounds need more --seconds")
                continue
            matrix.courses[link][plan] = one
            matrix.write(out)
            print(f"{link_name(link)}, {shown_plan(plan)}: {one.last_step} steps of {one.step_s:.3f} s", flush=True)


def interleaved(matrix: Matrix, plans: Mapping[str, str], *, rounds: int, limit_s: float) -> dict[str, list[float]]:
    """Time a step of each link's plan again, A B C, C B A, ...; returns the times by link."""
    times: dict[str, list[float]] = {link: [] for link in plans}
    batch = f"+batch(size={matrix.task.batch},micro={matrix.task.batch // SITES})"
    for number in range(rounds):
        for link in plans if number % 2 == 0 else reversed(list(plans)):
            with tempfile.TemporaryDirectory() as folder, made_sites(link, Path(folder)) as hosts:
                plan = plans[link]
                one = course(hosts, plan if plan == DDP else plan + batch, matrix.task, limit_s=limit_s)
            times[link].append(one.step_s)
            print(f"round {number + 1}, {link_name(link)}, {shown_plan(plan)}: {one.step_s:.3f} s", flush=True)
    return times


def compare(matrix: Matrix, *, rounds: int, limit_s: float) -> None:
    """Say how many times as long the best plan of each slow link takes there as the first link's takes on that."""
    found = {link: best[1] for link in matrix.courses if (best := matrix.best(link)) is not None}
    if len(found) < len(matrix.courses) or not rounds:
        return
    times = interleaved(matrix, found, rounds=rounds, limit_s=limit_s)
    first, *slow = found
    took: dict[str, float] = {}
    for link, plan in found.items():
        steps, step_s = matrix.courses[first][plan].steps_to(matrix.task.target), statistics.median(times[link])
        if steps is not None:
            took[link] = steps * step_s
            print(f"{link_name(link)}, {shown_plan(plan)}: {steps:.1f} steps of {step_s:.3f} s, {took[link]:.1f} s")
    for link in slow:
        print(f"{link_name(link)}: {took[link] / took[first]:.2f}x of {link_name(first)} (aim: {AIM}x)")


def begun(out: Path, task: Task, links: Sequence[str]) -> Matrix:
    """What was kept, or a new matrix; SystemExit where something else was measured."""
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return Matrix(task=task, courses={link: {} for link in links})
    matrix = Matrix.read(out)
    if matrix.task != task or next(iter(matrix.courses)) != links[0]:
        raise SystemExit(
            f"{out} has other work: {matrix.task}, first on {next(iter(matrix.courses))}; name another file"
        )
    for link in links:
        matrix.courses.setdefault(link, {})
    return matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--syncs", nargs="*", default=SYNCS)
    parser.add_argument("--wires", nargs="*", default=WIRES)
    parser.add_argument("--links", nargs="+", default=LINKS, metavar="MBIT:MS")
    parser.add_argument("--seconds", type=float, default=45.0, help="of a plan on a slow link")
    parser.add_argument("--longest", type=float, default=240.0, help="seconds of a plan on the first link")
    parser.add_argument("--target", type=float, default=2.3, help="held-out loss, nats per byte")
    parser.add_argument("--steps", type=int, default=400, help="at most")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate, of AdamW")
    parser.add_argument("--rounds", type=int, default=3, help="in which the best plans are timed again; 0: none")
    parser.add_argument("--batch", type=int, default=128, help="samples of a step, on all sites together")
    parser.add_argument("--out", type=Path, default=Path("runs/sites.json"))
    options = options_of(
        parser,
        takes="several hours",
        quick={
            "syncs": ["localsgd(every=8)"],
            "wires": ["int8"],
            "links": ["100:50"],
            "seconds": 10.0,
            "longest": 20.0,
            "rounds": 0,
            "batch": 32,
            "out": Path("runs/sites_quick.json"),
        },
    )
    if (why := refusal()) is not None:
        parser.error(f"far sites cannot be made here: {why}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the sites are removed
    task = Task(steps=options.steps, batch=options.batch, lr=options.lr, every=16, held_out=128, target=options.target)
    plans = [DDP, *possible(options.syncs, options.wires, task)]
    first = options.links[0]
    matrix = begun(options.out, task, options.links)
    for link in options.links:
        limit_s = options.longest if link == first else options.seconds
        missing = [plan for plan in plans if plan not in matrix.courses[link]]
        measure(matrix, missing, link, limit_s=limit_s, out=options.out)
    print("", *matrix.table(), "", sep="\n")
    compare(matrix, rounds=options.rounds, limit_s=options.seconds)


if __name__ == "__main__":
    main()
