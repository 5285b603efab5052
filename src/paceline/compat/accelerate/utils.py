"""The names of `accelerate.utils` that programs use in a training loop; others are refused by name."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import gc
import importlib.util
import inspect
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.compat.accelerate.refused_names import refused_in_module
from paceline.errors import PlanError
from paceline.host_memory import is_out_of_memory
from paceline.worker.program_worker import program_worker

__all__ = [
    "AutocastKwargs",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "find_executable_batch_size",
    "is_schedulefree_available",
    "is_xpu_available",
    "set_seed",
]


class DistributedType(enum.StrEnum):
    """Where a program's processes run; here it is NO, MULTI_CPU or MULTI_GPU."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class PrecisionType(enum.StrEnum):
    """In which numbers a program computes."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class DDPCommunicationHookType(enum.StrEnum):
    """How DDP compresses gradients; here the plan's wire says it."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclasses.dataclass
class ProjectConfiguration:
    """Where a project keeps its states: `project_dir`/checkpoints/checkpoint_0, ... with automatic names."""

    project_dir: str | None = None
    logging_dir: str | None = None
    automatic_checkpoint_naming: bool = False
    total_limit: int | None = None
    iteration: int = 0
    save_on_each_node: bool = False

    def __post_init__(self) -> None:
        self.logging_dir = self.logging_dir or self.project_dir

    def set_directories(self, project_dir: str | None = None) -> None:
        """Set both directories."""
        self.project_dir = project_dir
        self.logging_dir = self.logging_dir or project_dir


@dataclasses.dataclass
class GradientAccumulationPlugin:
    """How many batches are accumulated. Raises PlanError for what the loop of a step cannot do."""

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        if not self.sync_with_dataloader:
            raise PlanError(
                "GradientAccumulationPlugin(sync_with_dataloader=False) accumulates over the end of an epoch: here a "
                "step's samples are of one epoch. Leave it out."
            )
        if not self.adjust_scheduler:
            raise PlanError(
                "GradientAccumulationPlugin(adjust_scheduler=False) steps the schedule for every batch that is "
                "accumulated: here it steps with the optimizer. Leave it out, or do not prepare the scheduler."
            )


@dataclasses.dataclass
class DataLoaderConfiguration:
    """How loaders are prepared. `even_batches` and `dispatch_batches` change nothing: no sample is repeated, and each
    worker reads its own. Raises PlanError for what is not there."""

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False

    def __post_init__(self) -> None:
        if self.use_seedable_sampler or self.data_seed is not None:
            raise PlanError(
                "DataLoaderConfiguration(use_seedable_sampler=True) is not needed: every worker has the order that the "
                "loader's own sampler draws, and a resumed epoch has it again. Leave it out, with data_seed."
            )


@dataclasses.dataclass
class DistributedDataParallelKwargs:
    """Options of DDP, of which none is needed; `comm_hook` is refused, since the plan's wire compresses gradients."""

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        wires = {"fp16": "cast(dtype=fp16)", "bf16": "cast(dtype=bf16)"}
        hook = DDPCommunicationHookType(self.comm_hook).value
        if hook != "no":
            raise PlanError(
                f"DistributedDataParallelKwargs(comm_hook={hook!r}): how gradients travel is said by the plan. Leave "
                f"it out, and run with --plan {wires.get(hook, 'powersgd(rank=1)')!r}."
            )


@dataclasses.dataclass
class AutocastKwargs:
    """How models autocast: `enabled=False` leaves their forwards, or a block, in single precision."""

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclasses.dataclass
class InitProcessGroupKwargs:
    """Options of torch's process group, of which none is used: the job says how long a worker waits for others."""

    backend: str | None = None
    init_method: str | None = None
    timeout: datetime.timedelta | None = None


@dataclasses.dataclass
class ProfileKwargs:
    """What `accelerator.profile()` has torch's profiler record."""

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def build(self, index: int) -> Any:
        """torch's profiler with these options; its trace goes to a file of this process's index."""
        known = {"cpu": torch.profiler.ProfilerActivity.CPU, "cuda": torch.profiler.ProfilerActivity.CUDA}
        ready = self.on_trace_ready
        if ready is None and self.output_trace_dir is not None:
            ready = functools.partial(_export_trace, Path(self.output_trace_dir) / f"profile_{index}.json")
        return torch.profiler.profile(
            activities=None if self.activities is None else [known[name] for name in self.activities],
            schedule=None if self.schedule_option is None else torch.profiler.schedule(**self.schedule_option),
            on_trace_ready=ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


def _export_trace(path: Path, profiler: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python, numpy and torch, alike on all workers. With `device_specific` each worker has its own seed, for what
    it draws itself: the order of samples and a batch's dropout are the same on any number of workers."""
    if device_specific and (worker := program_worker()) is not None:
        seed += worker.rank
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def find_executable_batch_size(function: Any = None, starting_batch_size: int = 128, **more: Any) -> Any:
    """Call the function with a batch size, and with smaller ones while it runs out of memory.

    On several workers it is called once: a step that runs out of memory is taken again there in smaller micro-batches,
    or the run starts again with them, and no worker may choose another size than the others.
    """
    if function is None:
        return functools.partial(find_executable_batch_size, starting_batch_size=starting_batch_size, **more)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "batch_size" in kwargs or not inspect.signature(function).parameters:
            raise TypeError(f"{function.__name__} must take the batch size as its first parameter, and is given it")
        size = starting_batch_size
        while True:
            worker = program_worker()
            try:
                return function(size, *args, **kwargs)
            except Exception as error:  # all but a lack of memory is raised again
                if not is_out_of_memory(error) or size <= 1 or (worker is not None and worker.workers > 1):
                    raise
            size //= 2
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    return run


def is_schedulefree_available() -> bool:
    """Whether the package of schedule-free optimizers is installed."""
    return importlib.util.find_spec("schedulefree") is not None


def is_xpu_available(check_device: bool = False) -> bool:
    """Whether there are XPUs, on which nothing runs here."""
    return False


def __getattr__(name: str) -> Any:
    refused_in_module("accelerate.utils", name)
