"""One plan on one cluster: seconds and bytes of a step by part, what so much data takes, and the ranking of plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from paceline import config
from paceline.cli.plan_costs.subject import Subject
from paceline.errors import PlanError
from paceline.plan import Compute, Plan
from paceline.planner.data_parallel import sent_bytes
from paceline.planner.goodput import goodput
from paceline.planner.lossy_plans import LossyPlan, what_changes
from paceline.planner.memory import MEMORY_PARTS
from paceline.planner.named_cluster import NamedCluster
from paceline.planner.predict import PARTS
from paceline.planner.search import PricedPlan, is_exact, lack_text, remedy
from paceline.units import bytes_text, count_text, duration_text, gigabytes_text

__all__ = ["FITS", "Prices", "memory_lines", "precision_lines", "print_prediction", "remedy_lines", "short_text"]

SHOWN = 8  # plans of the ranking
SMALL = 0.01  # parts of a step below it are left out
LACKING, LOSSY = 3, 3  # plans that lack memory, and that have other losses
INDENT, WIDE = " " * 41, 59  # of the column of plans
HEAD = "    a step       samples/s      GB  fits   plan"
FITS = {"fits": "yes", "unsure": "maybe", "does not fit": "no"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """How much data there is, and what a device costs an hour, by the cluster's name ("": of all others)."""

    samples: float | None = None
    per_hour: dict[str, float] = dataclasses.field(default_factory=dict[str, float])

    @classmethod
    def read(cls, words: Sequence[str], *, samples: float | None, of: Mapping[str, str]) -> Prices:
        """Read "2.5", and "h100x8-ib=2.5" of one of the clusters `of`: their names by what the command calls them. That
        may be a file. PlanError where some of several clusters have a price and others none.
        """
        found: dict[str, float] = {}
        for word in words:
            name, _, text = word.rpartition("=")
            name = of.get(name, name)
            if name and name not in of.values():
                raise PlanError(f"--price {word} names no cluster of this question: {', '.join(of.values())}.")
            number = config.parse_value(text, float, path=f"--price {word}")
            if not 0 < number < float("inf"):
                raise PlanError(f"--price {word}: a device and hour cost {text}; it must be above 0.")
            found[name] = number
        lacking = [name for name in of.values() if found and not found.keys() & {"", name}]
        if lacking:
            raise PlanError(
                f"{lacking[0]} has no price, so it cannot be compared: add --price {lacking[0]}=X, or one --price X of "
                "all others."
            )
        return cls(samples=samples, per_hour=found)

    def seconds(self, one: PricedPlan) -> float | None:
        return None if self.samples is None else self.samples / one.samples_per_s

    def money(self, one: PricedPlan, cluster: str, *, share: float = 1.0) -> float | None:
        """What the samples cost, where `share` of the time goes into steps that count."""
        price, seconds = self.per_hour.get(cluster, self.per_hour.get("")), self.seconds(one)
        return None if price is None or seconds is None else seconds / share / 3600 * one.case.axes.workers * price

    def price_of(self, cluster: str) -> float | None:
        return self.per_hour.get(cluster, self.per_hour.get(""))


def print_prediction(
    subject: Subject, where: NamedCluster, prices: Prices, *, mtbf_s: float | None, replace_s: float
) -> bool:
    """Print what a step costs there; return False where the plan surely does not fit."""
    print(f"\ncluster  {where}")
    print(*subject.lines(), sep="\n")
    correction = subject.correction(subject.plan, workers=subject.workers)
    if correction.receipts:
        told = "1 receipt" if correction.receipts == 1 else f"{correction.receipts} receipts"
        print(f"         corrected by {told} of {correction.of} on this cluster")
    own = subject.price(subject.plan, where.cluster, workers=subject.workers)
    print(*_step_lines(own), sep="\n")
    print(*memory_lines(own), sep="\n")
    share = 1.0
    if mtbf_s is not None:
        found = goodput(
            own.case.axes,
            per_host=where.cluster.devices_per_host,
            step_s=own.step.step_s,
            mtbf_s=mtbf_s,
            replace_s=replace_s,
        )
        share = found.share
        print(
            f"goodput  {share * 100:.1f} % of the time goes into steps that count, with {found.failures_per_day:.2g} "
            f"failures a day of {duration_text(sum(found.costs.values()))} each"
        )
        for name, value in found.costs.items():
            print(f"         {duration_text(value):>12}  {name}")
    if prices.samples is not None and not subject.is_data:
        print("total    not known: samples of the script's data may cost more than what was counted")
    elif prices.samples is not None:
        seconds, money = (prices.seconds(own) or 0.0) / share, prices.money(own, where.name, share=share)
        price = f", {money:,.2f} at {prices.price_of(where.name):g} a device and hour" if money is not None else ""
        with_failures = " with failures" if mtbf_s is not None else ""
        print(f"total    {count_text(int(prices.samples))} samples: {duration_text(seconds)}{with_failures}{price}")
    print(*_ranking(subject, where, own), sep="\n")
    return own.fits != "does not fit"


def _step_lines(one: PricedPlan) -> Iterator[str]:
    wide = math.exp(one.half_width)
    step = one.step.step_s
    yield (
        f"step     {duration_text(step)} (80 % band: {duration_text(step / wide)} to {duration_text(step * wide)}), "
        f"{count_text(one.samples_per_s)} samples/s, {one.step.mfu * 100:.0f} % of the devices' peak in bf16"
    )
    for name, value in sorted(one.step.parts.items(), key=lambda part: -part[1]):
        if value / step >= SMALL:
            yield f"         {value / step * 100:3.0f} %  {PARTS[name]}"
    sent = sent_bytes(one.case)
    if sent > 0:
        yield f"         each worker sends {bytes_text(sent)} a step to other replicas"


def memory_lines(one: PricedPlan) -> Iterator[str]:
    """The memory of the fullest worker, its verdict and its parts."""
    peak, memory = gigabytes_text(one.memory.peak), gigabytes_text(one.case.cluster.device.memory)
    verdict = {
        "fits": "it fits",
        "unsure": "it may fit; the estimate may be off by more than the difference",
        "does not fit": "it does not fit",
    }[one.fits]
    yield f"memory   {peak} of {memory} GB: {verdict}"
    for name, value in sorted(one.memory.parts.items(), key=lambda part: -part[1]):
        if value / one.memory.peak >= SMALL:
            yield f"         {gigabytes_text(value):>6} GB  {MEMORY_PARTS[name]}"
    if one.memory.elsewhere:
        each, together = (gigabytes_text(one.memory.elsewhere * count) for count in (1, one.case.on_host))
        there = "on its disk" if one.case.on_disk else f"of {gigabytes_text(one.case.cluster.host_memory)} GB"
        yield f"host     {each} GB for each worker, {together} GB for those of a host, {there}"


def _ranking(subject: Subject, where: NamedCluster, own: PricedPlan) -> Iterator[str]:
    """The best plans with the script's batch and precision, those that lack memory, and what is faster with other
    losses.
    """
    ranked = subject.best(subject.plan, where.cluster, workers=subject.workers)
    if not ranked:
        yield (
            f"\nNo other plan shares {own.plan.batch.size} samples evenly among {own.case.axes.workers} workers: try "
            "another batch size."
        )
        return
    there = [one for one in ranked if one.fits != "does not fit"]
    if there:
        yield "\nThe best plan of each layout, with this batch and precision, the fastest first"
    else:
        yield "\nNo plan fits these devices. Least memory:"
    yield HEAD
    for one in there[:SHOWN] or ranked[: SHOWN // 2]:
        yield _row(one, "   <- the script's" if one.plan == own.plan else "")
        if not there:
            yield f"{INDENT}{lack_text(one)}"
    if there:
        yield f"the first, to copy: --plan '{there[0].plan}'"
    lacking = [one for one in ranked if one.fits == "does not fit"]
    if there and lacking:
        lacking.sort(key=lambda one: (one.step.step_s, len(str(one.plan))))
        yield ("\nFaster, if there were the memory" if _is_faster(lacking[0], there[0]) else "\nWhat does not fit")
        for one in lacking[:LACKING]:
            yield _row(one)
            yield f"{INDENT}{lack_text(one)}"
    if not there:
        advice = remedy(subject.plan, subject.model, where.cluster, subject.calibration, workers=subject.workers)
        yield from remedy_lines(advice)
    if not is_exact(own.plan):
        yield f"\nThe script's plan has other losses than one process: {what_changes(own.plan)}."
    yield from _lossy_lines(
        subject.lossy([one for one in there if is_exact(one.plan)], where.cluster, workers=subject.workers)
    )
    yield from precision_lines(subject, [where])
    yield "\nWhether the model can be cut so: paceline plan SCRIPT --check --plan PLAN"


def precision_lines(subject: Subject, clusters: Sequence[NamedCluster]) -> Iterator[str]:
    """What the best plan takes in bf16, where the script's plan computes in fp32 on devices that are slower in it."""
    plan, head = (
        subject.plan,
        "\nThese compute in fp32, as the plan says. With compute(precision=bf16) the best plan takes",
    )
    half = dataclasses.replace(plan, compute=dataclasses.replace(plan.compute, precision="bf16"))
    for where in clusters if plan.compute.precision == "fp32" else ():
        device = where.cluster.device
        if device.is_synchronous or device.peak_of("fp32") >= device.peak["bf16"]:
            continue
        ranked = subject.best(half, where.cluster, workers=subject.workers)
        best = next((one for one in ranked if one.fits != "does not fit"), None)
        if best is not None:
            if head:
                yield head
                head = ""
            yield f"  {duration_text(best.step.step_s)} a step on {where.name}: {short_text(best.plan)}"


def _row(one: PricedPlan, remark: str = "") -> str:
    cells = f"{duration_text(one.step.step_s):>12} {count_text(one.samples_per_s):>10} {one.memory.peak / 1e9:7.1f}"
    return f"{cells}  {FITS[one.fits]:5}  {_wrapped(short_text(one.plan))}{remark}"


def _wrapped(plan: str) -> str:
    """A plan's text in lines that the console has room for; it is broken before a +."""
    lines = [""]
    for part in plan.replace("+", "\n+").replace(" ", "\n ").split("\n"):
        if len(lines[-1]) + len(part) > WIDE:
            lines.append("")
        lines[-1] += part
    return f"\n{INDENT}".join(lines)


def _is_faster(one: PricedPlan, other: PricedPlan) -> bool:
    return one.step.step_s < other.step.step_s


def _lossy_lines(found: Sequence[LossyPlan]) -> Iterator[str]:
    if not found:
        return
    yield "\nFaster, with other losses than one process (docs/explanation/compression.md has how far off)"
    yield HEAD
    for one in found[-LOSSY:]:
        yield _row(one.priced)
        yield f"{INDENT}{one.changes}"


def remedy_lines(advice: str) -> Iterator[str]:
    """Each way that there is on a line of its own."""
    for number, one in enumerate(advice.split(", or ")):
        yield f"remedy   {one}" if number == 0 else f"         or {one}"


def short_text(plan: Plan) -> str:
    """A plan without what all candidates share: its cuts and micro-batch, recompute, offload, how replicas agree."""
    compute = Compute(recompute=plan.compute.recompute, offload=plan.compute.offload)
    text = str(Plan(layout=plan.layout, sync=plan.sync, wire=plan.wire, compute=compute))
    return f"{text.replace('replicas=1+', '')} micro={plan.batch.resolved_micro}"
