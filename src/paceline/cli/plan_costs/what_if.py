"""`--what-if`, and several clusters: the script's plan and the best one of each case as a table, and which to take."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from paceline.cli.plan_costs.prediction import FITS, Prices, precision_lines, short_text
from paceline.cli.plan_costs.subject import Subject
from paceline.planner.named_cluster import NamedCluster
from paceline.planner.search import PricedPlan
from paceline.planner.what_if import variations
from paceline.units import count_text, duration_text

__all__ = ["print_what_if"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """One priced plan of one case; `label` is the case, "" in its further rows."""

    label: str
    case: str
    cluster: str
    priced: PricedPlan | None  # None: no plan takes the case
    is_own: bool = False


def print_what_if(
    subject: Subject, clusters: Sequence[NamedCluster], changes: Mapping[str, Sequence[str]], prices: Prices
) -> bool:
    """Print the table; return False where nothing in it may fit."""
    print()
    print(*(f"cluster  {where}" for where in clusters), sep="\n")
    print(*subject.lines(), sep="\n")
    rows = [row for where in clusters for row in _rows(subject, where, changes, has_names=len(clusters) > 1)]
    known = prices if subject.is_data else dataclasses.replace(prices, samples=None)
    print(*_table(rows, known), sep="\n")
    if prices.samples is not None and not subject.is_data:
        print("No totals: samples of the script's data may cost more than what was counted.")
    print(*_choice(rows, known), sep="\n")
    if "precision" not in changes:
        print(*precision_lines(subject, clusters), sep="\n")
    return any(row.priced is not None and row.priced.fits != "does not fit" for row in rows)


def _rows(
    subject: Subject, where: NamedCluster, changes: Mapping[str, Sequence[str]], *, has_names: bool
) -> Iterator[_Row]:
    for case in variations(subject.plan, where.cluster, where.known, changes, workers=subject.workers):
        words = [where.name] if has_names else []
        words += [f"{name}={value}" for name, value in case.changed.items()]
        label = " ".join(words)
        own = None if case.plan is None else subject.price(case.plan, case.cluster, workers=case.workers)
        ranked = subject.best(case.plan or case.asked, case.cluster, workers=case.workers)
        found = [own] if own is not None else []
        found += [one for one in ranked[:1] if own is None or one.plan != own.plan]
        for number, one in enumerate(found):
            yield _Row(
                label=label if number == 0 else "", case=label, cluster=where.name, priced=one, is_own=one is own
            )
        if not found:
            yield _Row(label=label, case=label, cluster=where.name, priced=None)


def _table(rows: Sequence[_Row], prices: Prices) -> Iterator[str]:
    wide = max(len("case"), *(len(row.label) for row in rows))
    head = f"{'case':<{wide}}  {'a step':>10}  {'samples/s':>9}"
    if prices.samples is not None:
        total = f"{count_text(int(prices.samples))} samples"
        head += f"  {total:>16}"
    if prices.per_hour:
        head += f"  {'cost':>12}"
    yield f"\n{head}  {'GB':>6}  fits   plan"
    for row in rows:
        if row.priced is None:
            yield f"{row.label:<{wide}}  no plan shares the batch evenly among these workers"
            continue
        one = row.priced
        cells = f"{row.label:<{wide}}  {duration_text(one.step.step_s):>10}  {count_text(one.samples_per_s):>9}"
        if prices.samples is not None:
            cells += f"  {duration_text(prices.seconds(one) or 0.0):>16}"
        if prices.per_hour:
            money = prices.money(one, row.cluster)
            cells += f"  {'' if money is None else f'{money:,.2f}':>12}"
        mine = "   <- the script's" if row.is_own else ""
        yield f"{cells}  {one.memory.peak / 1e9:6.1f}  {FITS[one.fits]:5}  {short_text(one.plan)}{mine}"


def _choice(rows: Sequence[_Row], prices: Prices) -> Iterator[str]:
    """Which to take: the fastest that surely fits, and the one that costs least."""
    fitting = [(row, row.priced) for row in rows if row.priced is not None and row.priced.fits == "fits"]
    if not fitting:
        yield "\nNothing here surely fits: ask with more workers, or with --fits what would."
        return
    found = {"fastest": max(fitting, key=lambda one: one[1].samples_per_s)}
    costs = [(money, pair) for pair in fitting if (money := prices.money(pair[1], pair[0].cluster)) is not None]
    if costs:
        found["cheapest"] = min(costs, key=lambda one: one[0])[1]
    yield ""
    if len({id(priced) for _, priced in found.values()}) == 1:
        found = {" and ".join(found): found["fastest"]}
    for name, (row, one) in found.items():
        seconds, money = prices.seconds(one), prices.money(one, row.cluster)
        total = "" if seconds is None else f": {duration_text(seconds)}" + ("" if money is None else f", {money:,.2f}")
        yield f"The {name} that fits: {row.case or 'the script as it is'}{total}"
        yield f"  {one.plan}"
