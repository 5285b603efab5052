"""`paceline export`: writes the model weights of a checkpoint as safetensors."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from paceline.cli.arguments import Commands, add_command
from paceline.errors import PlanError
from paceline.storage.address import plain_path

__all__ = ["add", "run"]

UNITS = {
    "": 1,
    **{
        f"{letter}{'I' * binary}": (1024 if binary else 1000) ** (1 + power)
        for power, letter in enumerate("KMGT")
        for binary in (0, 1)
    },
}


def add(commands: Commands) -> None:
    """Declare the command."""
    parser = add_command(
        commands,
        "export",
        summary="write a checkpoint's model weights as safetensors",
        description="Write the model weights of a checkpoint, or of a run's newest one, as safetensors, under the "
        "model's own names and from any layout: one file, or a folder that Hugging Face's from_pretrained reads. One "
        "tensor at a time is in memory.",
        examples="  paceline export RUN model.safetensors\n"
        "  paceline export RUN/checkpoints/step_00000100 model.safetensors\n"
        "  paceline export RUN tuned --format huggingface --dtype bf16\n"
        "  paceline export RUN exported/ --config config.json --max-shard-size 2GB\n"
        "  paceline export RUN s3://bucket/model.safetensors\n"
        "  paceline export s3://bucket/runs/first model.safetensors",
    )
    parser.add_argument(
        "source",
        metavar="RUN|CHECKPOINT",
        type=Path,
        help="directory of a run or of one of its checkpoints, or its address (s3://bucket/path)",
    )
    parser.add_argument(
        "target",
        metavar="FILE|FOLDER",
        type=Path,
        help="the safetensors file to write, or the folder (no suffix), or an address",
    )
    parser.add_argument(
        "--format",
        choices=("safetensors", "huggingface"),
        default="safetensors",
        help="huggingface: a folder as transformers saves the model (or peft its adapters), with its configuration and "
        "tokenizer, which from_pretrained and vLLM load unchanged (default: safetensors, under the model's own names)",
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of floating weights (default: as they were trained)"
    )
    parser.add_argument(
        "--max-shard-size", metavar="SIZE", help="of a folder's files, such as 500MB or 2GB (default: 5GB)"
    )
    parser.add_argument(
        "--config", metavar="PATH", type=Path, help="a config.json, or its folder, to copy to the folder"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file; returns its exit status."""
    target: Path = arguments.target
    size = None if arguments.max_shard_size is None else _num_bytes(arguments.max_shard_size)
    is_huggingface = arguments.format == "huggingface"
    if is_huggingface and target.suffix == ".safetensors":
        raise PlanError(f"{target} is one file: --format huggingface writes a folder, such as {target.stem}.")
    is_file = bool(target.suffix) and not target.is_dir() and not is_huggingface
    if is_file and (size is not None or arguments.config is not None):
        raise PlanError(
            f"{target} is one file: --max-shard-size and --config are for a folder, such as {target.stem}/."
        )
    options: dict[str, Any] = {
        "is_huggingface": is_huggingface,
        "dtype": arguments.dtype,
        "max_shard_bytes": size,
        "config": arguments.config,
    }
    if plain_path(arguments.source) is not None or plain_path(target) is not None:
        from paceline.checkpoint.export_remote import main_remote_export

        return main_remote_export(arguments.source, target, **options)
    folders = target.parents if is_file else [target, *target.parents]
    absent = [folder for folder in reversed(folders) if not folder.exists()]
    from paceline.checkpoint.export import main_export

    status = main_export(arguments.source, target, **options)
    made = [folder for folder in absent if folder.is_dir()]
    if made:
        print(f"made {'the folder' if len(made) == 1 else 'the folders'} {', '.join(map(str, made))}")
    return status


def _num_bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    number = 0.0 if found is None else float(found[1]) * UNITS[(found[2] or "").upper()]
    if number < 1:
        raise PlanError(f"--max-shard-size is {text!r}; it must be a size such as 500MB, 2GB or 1.5GiB.")
    return int(number)
