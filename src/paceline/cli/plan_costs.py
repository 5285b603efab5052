"""What `paceline plan SCRIPT --cluster NAME` adds: the predicted step of the script's plan, and other plans, ranked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.config import load_toml
from paceline.errors import PlanError
from paceline.planner.cluster import Cluster, catalogue, load_catalogue
from paceline.planner.constants import Calibration, built_in
from paceline.planner.memory import MEMORY_PARTS
from paceline.planner.model_costs import ModelCosts
from paceline.planner.predict import PARTS
from paceline.planner.search import PricedPlan, price, search
from paceline.units import count_text, duration_text

if TYPE_CHECKING:
    from paceline.worker.script_inspection import InspectionReport

__all__ = ["cluster_for", "print_costs"]

SHOWN = 8  # plans of the ranking
SMALL = 0.01  # parts of a step below it are left out


def cluster_for(name: str, workers: int) -> tuple[str, Cluster]:
    """Return the cluster of the catalogue, or of a TOML file of the same form, with hosts for so many workers.

    A file may be followed by the cluster's name in it: `mine.toml:two-hosts`.
    """
    path, _, wanted = name.partition(":")
    known = catalogue()
    if not path.endswith(".toml"):
        found = known.cluster(name)
        return name, dataclasses.replace(found, hosts=max(found.hosts, math.ceil(workers / found.devices_per_host)))
    names = list(load_toml(Path(path)).get("clusters", {}))
    wanted = wanted or (names[0] if len(names) == 1 else "")
    if not wanted:
        raise PlanError(f"{path} describes {len(names)} clusters: name one of them, as {path}:NAME.")
    found = load_catalogue(Path(path), base=known).cluster(wanted)
    if wanted in names and workers > found.devices:
        raise PlanError(
            f"{path}: [clusters.{wanted}] has {found.hosts} hosts of {found.devices_per_host} devices, too few for "
            f"{workers} workers: give it hosts = {math.ceil(workers / found.devices_per_host)}."
        )
    return wanted, found


def print_costs(found: InspectionReport, name: str, *, price_per_hour: float | None, samples: float | None) -> bool:
    """Print what a step costs on a cluster; return False where the plan surely does not fit."""
    label, cluster = cluster_for(name, found.workers)
    if not found.costs:
        name, why = next(iter(found.not_counted.items()), ("the script", "it prepares no model"))
        raise PlanError(
            f"What a step of {name} costs could not be counted: {why or 'its loop has no stepper, and no sample'}. It "
            "is counted without values, in the forward of worker.stepper(...) on the script's data, or else on "
            "worker.prepare(model, sample=...)."
        )
    model_name, model = max(found.costs.items(), key=lambda one: one[1].model_flops(one[1].sequence))
    others = [one for one in (*found.costs, *found.not_counted) if one != model_name]
    is_data = model_name not in found.not_counted
    device = cluster.device
    print(f"\ncluster  {label}: {cluster.hosts} x {cluster.devices_per_host} {device.name}, ", end="")
    print(f"{device.memory / 1e9:.0f} GB each, {cluster.network / 1e9:g} GB/s between hosts")
    print(f"model    {model_name}: {_model_text(model)}")
    if not is_data:
        why = found.not_counted[model_name] or "the loop has no worker.stepper"
        print(f"         counted on a small input or the sample, not on the script's data: {why}")
    if others:
        print(f"         only this model is priced, the largest one; not {', '.join(dict.fromkeys(others))}")
    calibration = built_in()
    state = max((one.peak or 0 for one in found.sizes.get(model_name, [])), default=0) or None
    own = price(found.plan, model, cluster, calibration, workers=found.workers, state=state)
    print(*_step_lines(own, calibration), sep="\n")
    if samples is not None and not is_data:
        print("total    not known: samples of the script's data may cost more than what was counted")
    elif samples is not None:
        seconds = samples / own.samples_per_s
        money = "" if price_per_hour is None else f", {seconds / 3600 * found.workers * price_per_hour:,.2f} at "
        money += "" if price_per_hour is None else f"{price_per_hour:g} a device and hour"
        print(f"total    {count_text(int(samples))} samples: {duration_text(seconds)}{money}")
    ranked = [
        own if one.plan == own.plan else one
        for one in search(found.plan, model, cluster, calibration, workers=found.workers)
    ]
    print(*_ranking(ranked, own), sep="\n")
    return own.fits != "does not fit"


def _model_text(model: ModelCosts) -> str:
    flops = count_text(int(model.model_flops(model.sequence)))
    blocks = f"{model.count} blocks" if model.rest is not None else "one unit"
    return f"{count_text(model.parameters)} parameters, {blocks}, {flops} operations a sample (forward and backward)"


def _step_lines(one: PricedPlan, calibration: Calibration) -> Iterator[str]:
    wide = math.exp(calibration.spreads["none"])
    step = one.step.step_s
    yield (
        f"step     {duration_text(step)} (80 % band: {duration_text(step / wide)} to {duration_text(step * wide)}), "
        f"{count_text(one.samples_per_s)} samples/s, {one.step.mfu * 100:.0f} % of the devices' peak in bf16"
    )
    for name, value in sorted(one.step.parts.items(), key=lambda part: -part[1]):
        if value / step >= SMALL:
            yield f"         {value / step * 100:3.0f} %  {PARTS[name]}"
    peak, memory = one.memory.peak / 1e9, one.case.cluster.device.memory / 1e9
    yield f"memory   {peak:.1f} of {memory:.0f} GB: {_verdict(one)}"
    for name, value in sorted(one.memory.parts.items(), key=lambda part: -part[1]):
        if value / one.memory.peak >= SMALL:
            yield f"         {value / 1e9:5.1f} GB  {MEMORY_PARTS[name]}"


def _verdict(one: PricedPlan) -> str:
    return {
        "fits": "it fits",
        "unsure": "it may fit; the estimate is too close to say",
        "does not fit": "it does not fit",
    }[one.fits]


def _ranking(ranked: Sequence[PricedPlan], own: PricedPlan) -> Iterator[str]:
    """The best plans with the script's batch and precision; where none fits, those that lack the least memory."""
    if not ranked:
        yield (
            f"\nNo other plan shares {own.plan.batch.size} samples evenly among {own.case.axes.workers} workers: try "
            "another batch size."
        )
        return
    if ranked[0].fits == "does not fit":
        yield "\nNo plan fits these devices. Least memory:"
    else:
        yield "\nThe best plan of each layout, with this batch and precision, the fastest first"
    yield "    a step       samples/s      GB  fits   plan"
    for one in ranked[:SHOWN]:
        fits = {"fits": "yes", "unsure": "maybe", "does not fit": "no"}[one.fits]
        cells = f"{duration_text(one.step.step_s):>12} {count_text(one.samples_per_s):>10} {one.memory.peak / 1e9:7.1f}"
        mine = "   <- the script's" if one.plan == own.plan else ""
        yield f"{cells}  {fits:5}  {one.plan}{mine}"
    yield "Whether the model can be cut so: paceline plan SCRIPT --check --plan PLAN"
