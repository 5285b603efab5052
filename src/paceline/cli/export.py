"""`paceline export`: writes the model weights of a checkpoint as safetensors."""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError

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
    target: Path = arguments.target
    if target.is_dir():
        raise PlanError(f"{target} is a directory: name the file to write, for example {target / 'model.safetensors'}.")
    absent = [folder for folder in reversed(target.parents) if not folder.exists()]
    from paceline.checkpoint.export import main_export

    status = main_export(arguments.source, target)
    made = [folder for folder in absent if folder.is_dir()]
    if made:
        print(f"made {'the folder' if len(made) == 1 else 'the folders'} {', '.join(map(str, made))}")
    return status
