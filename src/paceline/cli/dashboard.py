"""`paceline dashboard`: writes the Grafana dashboard and the Prometheus alert rules that come with the package."""

from __future__ import annotations

import argparse
from importlib import resources
from pathlib import Path

from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError, writing

__all__ = ["add", "run"]

FOLDER = "monitor/export/grafana"
NAMES = ("paceline-dashboard.json", "paceline-alerts.yml")


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "dashboard",
        summary="write a Grafana dashboard and Prometheus alert rules",
        description="Write a dashboard for Grafana and alert rules for Prometheus, which read the metrics that "
        "paceline run --metrics-port serves. Files that are there are kept, unless --force is given.",
        examples="  paceline dashboard monitoring/",
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to write them; made if needed")
    parser.add_argument("--force", action="store_true", help="replace files that are there")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write both files; returns 0."""
    folder: Path = arguments.folder
    targets = [folder / name for name in NAMES]
    there = [str(path) for path in targets if path.exists()]
    if there and not arguments.force:
        raise PlanError(f"{' and '.join(there)} would be replaced: name another folder, or add --force.")
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    for path in targets:
        text = resources.files("paceline").joinpath(FOLDER, path.name).read_text(encoding="utf-8")
        with writing(path):
            path.write_text(text, encoding="utf-8")
        print(path)
    return 0
