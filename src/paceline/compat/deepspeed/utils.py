"""`deepspeed.utils` and `deepspeed.runtime.utils`: loaders, logging, and whole tensors of parameters."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.comm.sharded_tensors import full_tensor
from paceline.compat.deepspeed.comm import world_here
from paceline.compat.deepspeed.data import RepeatingLoader
from paceline.compat.deepspeed_files.checkpoint_reading import read_deepspeed_checkpoint

__all__ = [
    "RepeatingLoader",
    "get_fp32_state_dict_from_zero_checkpoint",
    "log_dist",
    "logger",
    "print_rank_0",
    "safe_get_full_fp32_param",
    "see_memory_usage",
    "set_random_seed",
]

logger = logging.getLogger("deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a line on these workers; None, or -1 among them: on all."""
    rank = world_here()[0]
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[worker %d] %s", rank, message)


def print_rank_0(message: str, debug: bool = False, force: bool = False) -> None:
    """Print a line on the first worker, where `debug` or `force` is true."""
    if (debug or force) and world_here()[0] == 0:
        print(message, flush=True)


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's random numbers."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def see_memory_usage(message: str, force: bool = False, ranks: Sequence[int] = (0,)) -> None:
    """`paceline status` shows the memory of each worker: this prints nothing."""


def safe_get_full_fp32_param(param: Tensor) -> Tensor:
    """A parameter's whole, in fp32, between steps; all workers call it."""
    return full_tensor(param.detach()).float()


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path, tag: str | None = None, exclude_frozen_parameters: bool = False
) -> dict[str, Any]:
    """The whole weights of a checkpoint that DeepSpeed has written, by name."""
    return dict(read_deepspeed_checkpoint(Path(checkpoint_dir), tag=tag).weights)
