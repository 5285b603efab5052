"""`--fits`: yes or no with the memory by part, and where it is no, what would fit."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cli.plan_costs.prediction import memory_lines, remedy_lines
from paceline.cli.plan_costs.subject import Subject
from paceline.planner.named_cluster import NamedCluster
from paceline.planner.search import remedy

__all__ = ["print_fits"]


def print_fits(subject: Subject, clusters: Sequence[NamedCluster]) -> bool:
    """Print the verdict for each cluster; return whether the plan surely fits one of them."""
    print()
    print(*subject.lines(), sep="\n")
    fits = False
    for where in clusters:
        own = subject.price(subject.plan, where.cluster, workers=subject.workers)
        fits = fits or own.fits == "fits"
        print(f"\ncluster  {where}")
        print(*memory_lines(own), sep="\n")
        if own.fits != "fits":
            advice = remedy(subject.plan, subject.model, where.cluster, subject.calibration, workers=subject.workers)
            print(*remedy_lines(advice), sep="\n")
    return fits
