"""The options that ask what a script costs. Every command reads this file, so the planner is imported elsewhere."""

from __future__ import annotations

import argparse

__all__ = ["add_options"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--cluster",
        metavar="NAME|FILE",
        action="append",
        default=[],
        help="with a script: predict what a step costs on this cluster, or here: this machine, measured; given several "
        "times: compare them",
    )
    parser.add_argument("--samples", metavar="N", help="with --cluster: how long so many samples take")
    parser.add_argument(
        "--price",
        metavar="X",
        action="append",
        default=[],
        help="with --samples: what they cost, at so much a device and hour; of one of several clusters: NAME=X",
    )
    parser.add_argument(
        "--fits", action="store_true", help="with --cluster: say only whether it fits, and if not, what would"
    )
    parser.add_argument(
        "--what-if",
        metavar="NAME=VALUE,...",
        action="append",
        nargs="+",
        default=[],
        help="with --cluster: the same with other workers, batch, link, device_link, per_host, memory, device or "
        "precision, as workers=16,32 link=25Gbit",
    )
    parser.add_argument(
        "--mtbf", metavar="HOURS", help="with --cluster: one host fails once in so many hours; what is left of the time"
    )
    parser.add_argument(
        "--replace-s", dest="replace", metavar="SECONDS", help="with --mtbf: until a host is replaced (default: 300)"
    )
    parser.add_argument(
        "--growth", metavar="FILE.svg", help="with --cluster: draw how samples per second grow with the workers"
    )
    parser.add_argument(
        "--trace", metavar="FILE.json", help="with --cluster: write the predicted step as a timeline for Perfetto"
    )
    parser.add_argument(
        "--verify", metavar="K", help="with --cluster here, or this machine's file: run the best K plans for some steps"
    )
    parser.add_argument(
        "--receipt", metavar="RUN", help="with --cluster: compare the prediction with a run that was done there"
    )
