"""`paceline import`: makes a checkpoint of another framework one of Paceline's, for a run to begin with."""

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
        "import",
        summary="make a checkpoint of torch, Accelerate, Lightning, Hugging Face or DeepSpeed one of Paceline's",
        description="Read a checkpoint of torch (a file of torch.save, or a folder of torch.distributed.checkpoint), "
        "Accelerate (save_state), Lightning (.ckpt), Hugging Face (safetensors or .bin, Trainer checkpoints) or "
        "DeepSpeed. Show what of it fits the models and optimizers that a script prepares, and write it as the "
        "checkpoint that a run of the script begins with, under any layout. Nothing in the files is run.",
        examples="  paceline import model.safetensors --script train.py --run-dir runs/tuned\n"
        "  paceline import lightning.ckpt --script train.py --run-dir runs/next --prefix-strip net.\n"
        "  paceline import accelerate_state/ --script train.py --run-dir runs/next --step 1200 --dry-run\n"
        "  paceline import checkpoint-500/ --out weights.safetensors",
    )
    parser.add_argument("source", metavar="FROM", type=Path, help="the file or folder to read")
    parser.add_argument("--script", metavar="FILE", type=Path, help="the script whose run is to begin with it")
    parser.add_argument(
        "--args", metavar="TEXT", default="", help="the script's own arguments, as one text: --args '--size small'"
    )
    parser.add_argument(
        "--run-dir", metavar="DIR", type=Path, help="directory of that run, which has no checkpoint yet"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the weights alone, to this safetensors file")
    parser.add_argument(
        "--prefix-strip",
        metavar="PREFIX",
        action="append",
        default=[],
        help="take this off the beginning of names; may be given many times (module. and _orig_mod. go by themselves)",
    )
    parser.add_argument(
        "--rename", metavar="OLD=NEW", action="append", default=[], help="replace OLD by NEW in names, after that"
    )
    parser.add_argument(
        "--model", metavar="NAME", help="which of the script's models gets the weights (default: its only one)"
    )
    parser.add_argument(
        "--step", metavar="N", type=int, help="the step that it was saved after (default: as it says, or 0)"
    )
    parser.add_argument(
        "--weights-only", action="store_true", help="leave the optimizer's and the scheduler's state out"
    )
    parser.add_argument(
        "--leave-unexpected", action="store_true", help="pass over tensors that the script's model does not have"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the table, and write nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the table and write the checkpoint; returns 1 where it does not fit."""
    has_target = arguments.run_dir is not None or arguments.out is not None
    if not has_target and not arguments.dry_run:
        raise PlanError(
            "paceline import needs a place to write to: --run-dir RUN with --script train.py, or --out "
            "weights.safetensors; --dry-run only shows what there is."
        )
    if arguments.run_dir is not None and arguments.script is None:
        raise PlanError(
            f"--run-dir {arguments.run_dir} begins a run of a script: name it, --script train.py. What it prepares "
            "says which tensors are wanted, and in which order its optimizer holds them."
        )
    if arguments.step is not None and arguments.step < 0:
        raise PlanError(f"--step is {arguments.step}; it must be 0 or more.")
    from paceline.compat.imports.command import import_checkpoint

    return import_checkpoint(arguments)
