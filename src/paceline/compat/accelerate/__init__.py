"""Programs of Hugging Face Accelerate: `from paceline.compat.accelerate import Accelerator` for `accelerate`."""

from __future__ import annotations

from typing import Any

from paceline.compat.accelerate.accelerator import Accelerator, skip_first_batches
from paceline.compat.accelerate.local_sgd import LocalSGD
from paceline.compat.accelerate.refused_names import refused_in_module
from paceline.compat.accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DistributedType,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
    find_executable_batch_size,
)

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "ProfileKwargs",
    "ProjectConfiguration",
    "find_executable_batch_size",
    "skip_first_batches",
]


def __getattr__(name: str) -> Any:
    refused_in_module("accelerate", name)
