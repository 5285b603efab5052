"""`paceline plan --from FILE`: finds out of which framework a configuration file is, and has it converted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from paceline.compat.conversion import ConfigConversion

__all__ = ["convert_config_file"]

# Keys that `accelerate config` writes into each of its files, and DeepSpeed does not know.
LAUNCH_KEYS = frozenset({"compute_environment", "distributed_type", "num_processes", "num_machines"})


def convert_config_file(path: Path, *, workers: int | None = None) -> ConfigConversion:
    """Return what a ds_config.json of DeepSpeed, or a file of `accelerate launch`, is here, for so many workers.

    `workers` wins over what the file says; None: as many as it says, or one. Raises PlanError where it cannot be read.
    """
    if _is_of_accelerate(path):
        from paceline.compat.accelerate.launch_config import read_launch_config

        found = read_launch_config(path)
        return found if workers is None else dataclasses.replace(found, job=found.job | {"workers": str(workers)})
    from paceline.compat.deepspeed_files.config import convert_config

    return convert_config(path, workers=workers)


def _is_of_accelerate(path: Path) -> bool:
    if path.suffix in (".yaml", ".yml"):
        return True
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False  # its reader says why
    return isinstance(found, dict) and not LAUNCH_KEYS.isdisjoint(found)
