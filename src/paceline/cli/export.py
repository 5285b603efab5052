"""`paceline export`: writes the model weights of a checkpoint as safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import Commands, add_command

__all__ = ["add", "run"]


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "export",
        summary="write a checkpoint's model weights as safetensors",
        description="Write the model weights of a checkpoint, or of a run's newest one, as one safetensors file.",
        examples="  paceline export RUN model.safetensors\n"
        "  paceline export RUN/checkpoints/step_00000100 model.safetensors",
    )
    parser.add_argument(
        "source", metavar="RUN|CHECKPOINT", type=Path, help="directory of a run or of one of its checkpoints"
    )
    parser.add_argument("target", metavar="FILE", type=Path, help="the safetensors file to write")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file; returns its exit status."""
    from paceline.checkpoint.export import main_export

    return main_export(arguments.source, arguments.target)
