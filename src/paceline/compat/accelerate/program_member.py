"""An accelerator as a member of its run: which process it is, what only one does, and what all exchange."""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.compat.accelerate.blank_tracker import BlankTracker
from paceline.compat.accelerate.exchange import gather_values, pad_values, part_of_values, reduce_values
from paceline.compat.accelerate.flat_loop import FlatLoop
from paceline.compat.accelerate.utils import DistributedType, ProjectConfiguration
from paceline.compat.accelerate.world import ProgramWorld
from paceline.events import Note
from paceline.worker.run_member import parts_of
from paceline.worker.worker import Worker

__all__ = ["ProgramMember"]

F = TypeVar("F", bound=Callable[..., Any])


class ProgramMember:
    """The part of an `Accelerator` that takes no steps."""

    project_configuration: ProjectConfiguration

    def __init__(self, worker: Worker, flat: FlatLoop, world: ProgramWorld) -> None:
        self.worker = worker
        self._flat, self._world = flat, world
        self._told: set[str] = set()

    def __repr__(self) -> str:
        world = self._world
        return f"Accelerator(process {world.index} of {world.processes}, on {self.device}, plan {self.worker.plan})"

    # Which process this is.

    @property
    def device(self) -> torch.device:
        """The device of this worker."""
        return self.worker.device

    @property
    def num_processes(self) -> int:
        """The processes of the program's world: as many as there are workers with batches of their own, unless a
        checkpoint or PACELINE_PROCESSES says more."""
        world = self._world
        if world.processes != world.size:
            self._tell(
                f"num_processes is {world.processes}, and {world.size} run: what the program shares out itself by "
                "process_index is left out for the others. Use split_between_processes"
            )
        return world.processes

    @property
    def process_index(self) -> int:
        """This worker's number among those that run different batches, from 0: workers of one replica have the same."""
        return self._world.index

    @property
    def local_process_index(self) -> int:
        """This worker's number on its host, from 0."""
        return parts_of(self.worker).files.assignment.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first worker."""
        return self.worker.is_first

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first worker of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last worker."""
        return self.worker.rank == self.worker.workers - 1

    @property
    def distributed_type(self) -> DistributedType:
        """NO for one worker, else MULTI_CPU or MULTI_GPU, whatever the layout."""
        if self.worker.workers == 1:
            return DistributedType.NO
        return DistributedType.MULTI_GPU if self.device.type == "cuda" else DistributedType.MULTI_CPU

    @property
    def use_distributed(self) -> bool:
        """Whether there are several workers."""
        return self.worker.workers > 1

    @property
    def project_dir(self) -> str | None:
        """Of the project's configuration."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Of the project's configuration."""
        return self.project_configuration.logging_dir

    @property
    def scaler(self) -> None:
        """None, as where gradients are not scaled. In fp16 the run scales them, and the scale is in its checkpoints."""
        return

    @property
    def fp8_recipe_handler(self) -> None:
        """None: no model computes in FP8."""
        return

    @property
    def state(self) -> ProgramMember:
        """This object, which has what Accelerate's state tells of the process."""
        return self

    # What one does.

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the first worker."""
        if self.is_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: F) -> F:
        """Have a function run on the first worker only."""
        return _only_where(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: F) -> F:
        """Have a function run on the first worker of each host only."""
        return _only_where(lambda: self.is_local_main_process, function)

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Have the first worker run a block before the others do."""
        with self._one_first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Have the first worker of each host run a block before the others do."""
        with self._one_first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _one_first(self, is_one: bool) -> Iterator[None]:
        if not is_one:
            self._world.wait()
        yield
        if is_one:
            self._world.wait()

    def wait_for_everyone(self) -> None:
        """Return when all workers have called this."""
        self._world.wait()

    @contextlib.contextmanager
    def split_between_processes(
        self, inputs: Sequence[Any] | Tensor | Mapping[str, Any], apply_padding: bool = False
    ) -> Iterator[Any]:
        """Give a block this worker's part of a sequence, a tensor, or a mapping of them, in order.

        The parts together are the whole on any number of workers. With `apply_padding` short ones have the last element
        again, until all are as long.
        """
        yield part_of_values(inputs, self._world, is_padded=apply_padding)

    # What all exchange. All workers call these.

    def gather(self, tensor: Any) -> Any:
        """Return the workers' tensors behind each other along dim 0, also those of a repeated batch."""
        return gather_values(tensor, self._world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return what `gather` does for the samples of the loader's present batch, each sample once."""
        is_object = use_gather_object or not _is_of_tensors(input_data)
        return gather_values(input_data, self._world, is_object=is_object, keep=self._flat.handed)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sums (or "mean") of the workers' tensors, times `scale`."""
        return reduce_values(tensor, self._world, reduction=reduction, scale=scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Return tensors that are as long along `dim` as the longest of any worker."""
        return pad_values(tensor, self._world, dim=dim, pad_index=pad_index, pad_first=pad_first)

    def set_trigger(self) -> None:
        """Have the next `check_trigger()` be true on all workers."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """Whether any worker has called `set_trigger()` since the last look."""
        was_set = any(self._world.everywhere(self._is_triggered))
        if was_set:
            self._is_triggered = False
        return was_set

    _is_triggered = False

    # What the run's loggers get.

    def init_trackers(
        self, project_name: str, config: Mapping[str, Any] | None = None, init_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Tell the run's record the project and its configuration. The run's own loggers take the numbers: TensorBoard
        files are written anyway, and `paceline run --log wandb` (or mlflow) starts the others."""
        shown = ", ".join(f"{name}={value}" for name, value in (config or {}).items())
        self._tell(f"project {project_name}{f': {shown}' if shown else ''}")
        if init_kwargs:
            names = ", ".join(sorted(init_kwargs))
            self._tell(f"init_trackers(init_kwargs=...) for {names} is not used: the run's loggers make their own runs")

    def log(self, values: Mapping[str, Any], step: int | None = None, log_kwargs: Any = None) -> None:
        """Give the first worker's numbers to the run's loggers, at the run's present step; texts are left out."""
        if not self.is_main_process:
            return
        found = {name: value for name, value in values.items() if _is_number(value)}
        if left_out := sorted(values.keys() - found.keys()):
            self._tell(f"accelerator.log(...) leaves out {', '.join(left_out)}: a run's metrics are numbers")
        if found:
            self.worker.report(**found)

    @property
    def trackers(self) -> list[Any]:
        """None: a run's loggers live beside its workers."""
        return []

    def get_tracker(self, name: str, unwrap: bool = False) -> BlankTracker:
        """Return a tracker that keeps nothing, and has the run's record say so."""
        return BlankTracker(name, self._tell)

    def end_training(self) -> None:
        """The program is at its end. The worker ends with the program; nothing is to be closed before."""

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """Save an object with torch on the first worker."""
        if safe_serialization:
            from safetensors.torch import save_file

            if self.is_main_process:
                save_file(obj, str(f))
        elif self.is_main_process:
            torch.save(obj, f)

    def _tell(self, text: str) -> None:
        """Note something in the run's record, once, on the first worker."""
        if self.is_main_process and text not in self._told:
            self._told.add(text)
            parts_of(self.worker).files.emit(Note(text=text))


def _only_where(is_here: Callable[[], bool], function: F) -> F:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_here() else None

    return run  # pyright: ignore[reportReturnType]  # of the same parameters


def _is_number(value: Any) -> bool:
    is_single = isinstance(value, Tensor) and value.numel() == 1
    return is_single or (isinstance(value, (numbers.Real, bool)) or getattr(value, "shape", None) == ())


def _is_of_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_of_tensors(one) for one in value.values())
    if isinstance(value, (list, tuple)):
        return all(_is_of_tensors(one) for one in value)
    return isinstance(value, Tensor)
