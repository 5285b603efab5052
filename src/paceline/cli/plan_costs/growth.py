"""`--growth FILE.svg`: samples per second over workers, of the script's plan and of the best one, with their bands."""

from __future__ import annotations

import dataclasses
import html
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from paceline.cli.plan_costs.subject import Subject
from paceline.errors import PlanError
from paceline.planner.cluster import Cluster
from paceline.planner.named_cluster import NamedCluster
from paceline.planner.what_if import with_workers
from paceline.units import count_text

__all__ = ["write_growth"]

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 440, 78, 24, 54, 52
COLORS = ("#1f6fb2", "#c2571a", "#2a8a4a", "#8a4fa8", "#b0892a")
MOST = 1024  # workers
STYLE = "font: 13px sans-serif; fill: #222"

Curve = Sequence[tuple[float, float]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    low: float
    high: float
    start: float
    stop: float

    def at(self, value: float) -> float:
        share = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return self.start + share * (self.stop - self.start)


def write_growth(path: Path, subject: Subject, clusters: Sequence[NamedCluster]) -> None:
    """Draw one color for each cluster: the best plan as a line in its band, the script's own cuts dashed.

    The batch stays as it is, so a step of any number of workers is the same step. Raises PlanError where no number of
    workers can share it.
    """
    curves = [(where.name, _best(subject, where), _own(subject, where)) for where in clusters]
    widest = max(
        subject.price(subject.plan, _with_hosts(where, subject.workers), workers=subject.workers).half_width
        for where in clusters
    )
    path.write_text(_drawing(curves, subject, widest), encoding="utf-8")
    most = max(workers for _, best, own in curves for workers, _ in (*best, *own))
    print(f"growth   {path}: samples per second on up to {most:g} workers")


def _numbers(subject: Subject) -> Iterator[int]:
    size = subject.plan.batch.size
    yield from (1 << power for power in range(MOST.bit_length()) if size % (1 << power) == 0)
    if subject.workers & (subject.workers - 1):
        yield subject.workers


def _best(subject: Subject, where: NamedCluster) -> Curve:
    found: list[tuple[float, float]] = []
    for workers in sorted(_numbers(subject)):
        ranked = subject.best(subject.plan, _with_hosts(where, workers), workers=workers)
        if ranked and ranked[0].fits != "does not fit":
            found.append((workers, ranked[0].samples_per_s))
    return found


def _own(subject: Subject, where: NamedCluster) -> Curve:
    found: list[tuple[float, float]] = []
    for workers in sorted(_numbers(subject)):
        plan = with_workers(subject.plan, workers)
        if plan is not None:
            priced = subject.price(plan, _with_hosts(where, workers), workers=workers)
            if priced.fits != "does not fit":
                found.append((workers, priced.samples_per_s))
    return found


def _with_hosts(where: NamedCluster, workers: int) -> Cluster:
    return dataclasses.replace(where.cluster, hosts=math.ceil(workers / where.cluster.devices_per_host))


def _drawing(curves: Sequence[tuple[str, Curve, Curve]], subject: Subject, half_width: float) -> str:
    points = [point for _, best, own in curves for point in (*best, *own)]
    if not points:
        raise PlanError(
            f"No plan of up to {MOST} workers fits these clusters with a batch of {subject.plan.batch.size}: nothing "
            "can be drawn. Ask with --fits what would fit."
        )
    band = math.exp(half_width)
    numbers = sorted({int(workers) for workers, _ in points})
    rates = [rate for _, rate in points]
    x = _Axis(low=numbers[0] / 1.15, high=numbers[-1] * 1.15, start=LEFT, stop=WIDTH - RIGHT)
    y = _Axis(low=min(rates) / band, high=max(rates) * band, start=HEIGHT - BOTTOM, stop=TOP)
    body = [*_grid(x, y, numbers)]
    for row, ((name, best, own), color) in enumerate(zip(curves, itertools.cycle(COLORS))):
        body += _curve(x, y, best, own, color, band)
        at = f'x="{LEFT + 14}" y="{TOP + 18 + 17 * row}"'
        body.append(f'<text {at} style="{STYLE}; fill: {color}">{html.escape(name)}</text>')
    title = (
        f"{subject.name}, {subject.plan.batch.size} samples a step: the best plan (line, 80 % band) and the script's"
    )
    body.append(f'<text x="{LEFT}" y="22" style="{STYLE}; font-weight: 600">{html.escape(title)} cuts (dashed)</text>')
    body.append(f'<text x="{LEFT}" y="40" style="{STYLE}">samples per second; dotted: in proportion to workers</text>')
    body.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" style="{STYLE}" text-anchor="end">workers</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    paper = f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{paper}\n' + "\n".join(body) + "\n</svg>\n"


def _grid(x: _Axis, y: _Axis, numbers: Sequence[int]) -> Iterator[str]:
    for value in numbers:
        at = f"{x.at(value):.1f}"
        yield f'<line x1="{at}" x2="{at}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#eee"/>'
        yield f'<text x="{at}" y="{HEIGHT - BOTTOM + 18}" style="{STYLE}" text-anchor="middle">{value}</text>'
    decades = range(math.floor(math.log10(y.low)), math.ceil(math.log10(y.high)) + 1)
    for value in (base * 10.0**power for power in decades for base in (1, 2, 5)):
        if y.low <= value <= y.high:
            at = y.at(value)
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="#eee"/>'
            yield (
                f'<text x="{LEFT - 8}" y="{at + 4:.1f}" style="{STYLE}" text-anchor="end">{count_text(value)}</text>'
            )
    yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}" stroke="#888"/>'


def _curve(x: _Axis, y: _Axis, best: Curve, own: Curve, color: str, band: float) -> Iterator[str]:
    def text(points: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x.at(workers):.1f},{y.at(rate):.1f}" for workers, rate in points)

    if best:
        upper, lower = [(n, rate * band) for n, rate in best], [(n, rate / band) for n, rate in reversed(best)]
        yield f'<polygon points="{text([*upper, *lower])}" fill="{color}" opacity="0.12"/>'
        first, rate = best[0]
        end = min(best[-1][0], first * y.high / rate)
        ideal = [(first, rate), (end, rate * end / first)]
        yield f'<polyline points="{text(ideal)}" fill="none" stroke="{color}" stroke-dasharray="1 4"/>'
        yield f'<polyline points="{text(best)}" fill="none" stroke="{color}" stroke-width="2"/>'
        for workers, samples in best:
            label = f"{workers} workers: {count_text(samples)} samples/s"
            at = f'cx="{x.at(workers):.1f}" cy="{y.at(samples):.1f}"'
            yield f'<circle {at} r="3.5" fill="{color}"><title>{label}</title></circle>'
    if own:
        yield f'<polyline points="{text(own)}" fill="none" stroke="{color}" stroke-width="1.5" stroke-dasharray="7 4"/>'
