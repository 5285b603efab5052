"""Paceline trains PyTorch models on many workers, from one script: any layout, the same loss.

Importing this package costs milliseconds and no torch; names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.comm.torch_backend.process_group import register_backend
    from paceline.data.mixture import Mixture
    from paceline.data.packed_sequences import PackedSequences, block_diagonal_mask
    from paceline.data.sharded_stream import ShardedStream
    from paceline.data.stream_mixture import StreamMixture
    from paceline.errors import (
        BadNumbersError,
        CheckpointError,
        LaunchError,
        PacelineError,
        PlanError,
        RunFileError,
        SyncError,
        WorkerError,
        WorkersLostError,
    )
    from paceline.hub.pretrained import from_pretrained
    from paceline.launch.engines.kubernetes import Kubernetes
    from paceline.launch.engines.ray import Ray
    from paceline.launch.engines.slurm import Slurm
    from paceline.launch.engines.ssh import Ssh
    from paceline.lr_scaling import scaled_lr
    from paceline.monitor.export.run_logger import LoggedRun, RunLogger, ScalarPoint
    from paceline.parallel.check.fits import fits
    from paceline.plan import (
        AllReduce,
        Batch,
        Cast,
        Compute,
        Gossip,
        Guard,
        Int8,
        Job,
        Layout,
        LocalSGD,
        Nesterov,
        OneBit,
        ParameterServer,
        Plan,
        PowerSGD,
        Raw,
        Sparse,
        TopK,
    )
    from paceline.runs.open_worker import open_worker
    from paceline.runs.run import run
    from paceline.runs.tune import tune_trainable
    from paceline.storage.reading import open_file
    from paceline.worker.data.step_batch import StepBatch
    from paceline.worker.state.weight_average import ExponentialMovingAverage
    from paceline.worker.worker import Worker

__all__ = [
    "AllReduce",
    "BadNumbersError",
    "Batch",
    "Cast",
    "CheckpointError",
    "Compute",
    "ExponentialMovingAverage",
    "Gossip",
    "Guard",
    "Int8",
    "Job",
    "Kubernetes",
    "LaunchError",
    "Layout",
    "LocalSGD",
    "LoggedRun",
    "Mixture",
    "Nesterov",
    "OneBit",
    "PacelineError",
    "PackedSequences",
    "ParameterServer",
    "Plan",
    "PlanError",
    "PowerSGD",
    "Raw",
    "Ray",
    "RunFileError",
    "RunLogger",
    "ScalarPoint",
    "ShardedStream",
    "Slurm",
    "Sparse",
    "Ssh",
    "StepBatch",
    "StreamMixture",
    "SyncError",
    "TopK",
    "Worker",
    "WorkerError",
    "WorkersLostError",
    "block_diagonal_mask",
    "fits",
    "from_pretrained",
    "open_file",
    "open_worker",
    "register_backend",
    "run",
    "scaled_lr",
    "tune_trainable",
]

_HOMES = {
    "paceline.comm.torch_backend.process_group": ("register_backend",),
    "paceline.data.mixture": ("Mixture",),
    "paceline.data.packed_sequences": ("PackedSequences", "block_diagonal_mask"),
    "paceline.data.sharded_stream": ("ShardedStream",),
    "paceline.data.stream_mixture": ("StreamMixture",),
    "paceline.storage.reading": ("open_file",),
    "paceline.errors": (
        "BadNumbersError",
        "CheckpointError",
        "LaunchError",
        "PacelineError",
        "PlanError",
        "RunFileError",
        "SyncError",
        "WorkerError",
        "WorkersLostError",
    ),
    "paceline.plan": (
        "AllReduce",
        "Batch",
        "Cast",
        "Compute",
        "Gossip",
        "Guard",
        "Int8",
        "Job",
        "Layout",
        "LocalSGD",
        "Nesterov",
        "OneBit",
        "ParameterServer",
        "Plan",
        "PowerSGD",
        "Raw",
        "Sparse",
        "TopK",
    ),
    "paceline.hub.pretrained": ("from_pretrained",),
    "paceline.launch.engines.kubernetes": ("Kubernetes",),
    "paceline.launch.engines.ray": ("Ray",),
    "paceline.launch.engines.slurm": ("Slurm",),
    "paceline.launch.engines.ssh": ("Ssh",),
    "paceline.lr_scaling": ("scaled_lr",),
    "paceline.monitor.export.run_logger": ("LoggedRun", "RunLogger", "ScalarPoint"),
    "paceline.parallel.check.fits": ("fits",),
    "paceline.runs.open_worker": ("open_worker",),
    "paceline.runs.run": ("run",),
    "paceline.runs.tune": ("tune_trainable",),
    "paceline.worker.data.step_batch": ("StepBatch",),
    "paceline.worker.state.weight_average": ("ExponentialMovingAverage",),
    "paceline.worker.worker": ("Worker",),
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("paceline")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
