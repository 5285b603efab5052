"""Scatter plots of predicted over measured seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
import numpy as np

from tables.fitting import Sample

__all__ = ["plot"]

Errors = Sequence[tuple[Sample, float]]
NAMED = 6  # sources with a color of their own


def plot(path: Path, panels: Sequence[tuple[str, Errors]]) -> None:
    """Write one panel for each list of (sample, error of the logarithm) as SVG; sources keep their color."""
    matplotlib.rcParams["svg.hashsalt"] = "paceline"  # the same picture from the same rows
    titles = [sample.title for _, errors in panels for sample, _ in errors]
    common = sorted(set(titles), key=lambda title: -titles.count(title))[:NAMED]
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 5.0), squeeze=False, layout="constrained")
    for axis, (name, errors) in zip(axes[0], panels, strict=True):
        seconds = np.array([sample.seconds for sample, _ in errors])
        predicted = seconds * np.exp([error for _, error in errors])
        ends = np.array([seconds.min() / 1.3, seconds.max() * 1.3])
        axis.fill_between(ends, ends / 1.15, ends * 1.15, color="0.92", label="within 15 %")
        axis.plot(ends, ends, color="0.5", linewidth=0.8)
        for title in [*common, "others"]:
            shown = [(sample.title if sample.title in common else "others") == title for sample, _ in errors]
            color = None if title != "others" else "0.4"
            axis.scatter(seconds[shown], predicted[shown], s=12, alpha=0.7, color=color, label=_short(title))
        off = np.abs(np.expm1([error for _, error in errors]))
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axis.set(xlabel="measured seconds of a step", ylabel="predicted")
        axis.set_title(
            f"{name}\nmedian {np.median(off) * 100:.1f} %, 90th percentile {np.quantile(off, 0.9) * 100:.1f} %"
        )
    axes[0][0].legend(fontsize=7, loc="upper left", frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _short(title: str) -> str:
    return title if len(title) < 40 else title[:38] + "…"
