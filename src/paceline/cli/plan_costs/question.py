"""What is asked about a script's costs, as the options of `options.py` say it, and the answer in its order."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import config
from paceline.cli.plan_costs.fits import print_fits
from paceline.cli.plan_costs.growth import write_growth
from paceline.cli.plan_costs.here import HERE, this_machine
from paceline.cli.plan_costs.prediction import Prices, print_prediction
from paceline.cli.plan_costs.subject import Subject
from paceline.cli.plan_costs.verify import print_receipt, print_verified
from paceline.cli.plan_costs.what_if import print_what_if
from paceline.errors import PlanError
from paceline.logs.trace_events import write_trace
from paceline.planner.named_cluster import cluster_named
from paceline.planner.timeline import step_slices
from paceline.planner.what_if import read_changes

if TYPE_CHECKING:
    from paceline.worker.script_inspection import InspectionReport

__all__ = ["CostQuestion", "print_answer", "read_question"]

OF_CLUSTERS = ("samples", "what_if", "mtbf", "growth", "trace", "verify", "receipt")
NEEDS = {"price": "samples"} | dict.fromkeys(OF_CLUSTERS, "cluster")
REPLACE_S = 300.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CostQuestion:
    """`clusters` by the names that were given. `mtbf_s`: seconds between two failures of one host."""

    clusters: Sequence[str]
    prices: Prices
    fits: bool = False
    changes: dict[str, list[str]] = dataclasses.field(default_factory=dict[str, list[str]])
    mtbf_s: float | None = None
    replace_s: float = REPLACE_S
    growth: Path | None = None
    trace: Path | None = None
    verify: int = 0
    receipt: Path | None = None


def read_question(arguments: argparse.Namespace) -> CostQuestion | None:
    """Return what the options ask, None if nothing; PlanError for options that lack what they need."""
    for option, other in NEEDS.items():
        if _is_given(arguments, option) and not _is_given(arguments, other):
            raise PlanError(f"{_spelled(option)} goes with {_spelled(other)}.")
    if arguments.replace is not None and arguments.mtbf is None:
        raise PlanError("--replace-s goes with --mtbf.")
    if arguments.mtbf is not None and (len(arguments.cluster) > 1 or arguments.what_if):
        raise PlanError("--mtbf is about one cluster, without --what-if: ask for each.")
    if arguments.fits and not arguments.cluster:
        raise PlanError("--fits goes with --cluster: whether it fits depends on the devices.")
    if not arguments.cluster:
        return None
    for option in ("growth", "trace"):
        text = getattr(arguments, option)
        if text is not None and not Path(text).parent.is_dir():
            raise PlanError(f"--{option} {text}: there is no folder {Path(text).parent}.")
    growth = None if arguments.growth is None else Path(arguments.growth)
    if growth is not None and growth.suffix != ".svg":
        raise PlanError(f"--growth writes an SVG drawing: give it a name that ends in .svg, not {growth.name!r}.")
    return CostQuestion(
        clusters=arguments.cluster,
        prices=Prices.read(
            arguments.price,
            samples=_positive(arguments.samples, "--samples"),
            of={name: HERE if name == HERE else cluster_named(name, 1).name for name in arguments.cluster},
        ),
        fits=arguments.fits,
        changes=read_changes(word for words in arguments.what_if for word in words),
        mtbf_s=None if arguments.mtbf is None else (_positive(arguments.mtbf, "--mtbf") or 1.0) * 3600,
        replace_s=_positive(arguments.replace, "--replace-s") or REPLACE_S,
        growth=growth,
        trace=None if arguments.trace is None else Path(arguments.trace),
        verify=_plans_to_verify(arguments),
        receipt=None if arguments.receipt is None else Path(arguments.receipt),
    )


def print_answer(found: InspectionReport, question: CostQuestion, *, script: Path, args: Sequence[str]) -> bool:
    """Print what was asked; return False where the plan surely does not fit any of the clusters."""
    subject = Subject.of(found)
    clusters = [
        this_machine(found.workers) if name == HERE else cluster_named(name, found.workers)
        for name in question.clusters
    ]
    if len(clusters) == 1:
        subject = subject.corrected(clusters[0])
    if question.fits:
        return print_fits(subject, clusters)
    if len(clusters) == 1 and not question.changes:
        fits = print_prediction(
            subject, clusters[0], question.prices, mtbf_s=question.mtbf_s, replace_s=question.replace_s
        )
    else:
        fits = print_what_if(subject, clusters, question.changes, question.prices)
    if question.trace is not None:
        own = subject.price(subject.plan, clusters[0].cluster, workers=subject.workers)
        write_trace(question.trace, step_slices(own))
        print(f"trace    {question.trace}: the predicted step; open it in ui.perfetto.dev or chrome://tracing")
    if question.verify:
        print_verified(subject, clusters[0], question.verify, script=script, args=args)
    if question.receipt is not None:
        print_receipt(subject, clusters[0], question.receipt)
    if question.growth is not None:
        write_growth(question.growth, subject, clusters)
    return fits


def _plans_to_verify(arguments: argparse.Namespace) -> int:
    for option in ("trace", "verify", "receipt"):
        if getattr(arguments, option) is not None and len(arguments.cluster) > 1:
            raise PlanError(f"--{option} is about one cluster: name only that.")
    if arguments.verify is None:
        return 0
    number = config.parse_value(arguments.verify, int, path="--verify")
    if not 1 <= number <= 100:
        raise PlanError(f"--verify is {arguments.verify}; give the number of plans to run, 1 to 100.")
    if arguments.cluster[0] != HERE and not arguments.cluster[0].partition(":")[0].endswith(".toml"):
        raise PlanError(
            f"--verify runs plans on this machine, which is not {arguments.cluster[0]}: name it as --cluster here, or "
            "by the file that paceline doctor has made of it."
        )
    return number


def _is_given(arguments: argparse.Namespace, option: str) -> bool:
    return getattr(arguments, option) not in (None, False, [])


def _spelled(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _positive(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    number = config.parse_value(text, float, path=name)
    if not 0 < number < float("inf"):
        raise PlanError(f"{name} is {text}; it must be above 0.")
    return number
