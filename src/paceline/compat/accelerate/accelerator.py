"""`Accelerator`: a program of Hugging Face Accelerate as a worker of a run, over the steps of every run.

    from paceline.compat.accelerate import Accelerator

The rest of the program stays. `prepare` makes its objects part of the run, its loaders give the micro-batches of steps,
and `backward` and `optimizer.step()` take them (`flat_loop.py`). Names that are not here are refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torch.utils.hooks import RemovableHandle

from paceline.compat.accelerate.flat_loop import FlatLoop
from paceline.compat.accelerate.mixed_precision import autocasting, have_forward_autocast
from paceline.compat.accelerate.options import Handlers, plan_of, refuse_options
from paceline.compat.accelerate.prepared_loader import LoaderContext, PreparedLoader
from paceline.compat.accelerate.prepared_optimizer import PreparedScheduler, gate_optimizer
from paceline.compat.accelerate.program_member import ProgramMember
from paceline.compat.accelerate.program_state import ProgramState
from paceline.compat.accelerate.refused_names import way_for
from paceline.compat.accelerate.saved_state import latest_directory, load_state, next_directory, save_state
from paceline.compat.accelerate.state_hooks import StateHooks
from paceline.compat.accelerate.utils import (
    AutocastKwargs,
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
)
from paceline.compat.accelerate.world import ProgramWorld, require_possible
from paceline.errors import PlanError
from paceline.runs.open_worker import open_worker
from paceline.worker.run_member import parts_of
from paceline.worker.stateful_member import loop_of
from paceline.worker.worker import Worker

__all__ = ["Accelerator", "skip_first_batches"]

STATE = "accelerate"  # the name of a program's own state in checkpoints
PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp64": "no"}


class _Program:
    """What all accelerators of a process share: it is one worker, with one loop."""

    opened: ClassVar[list[_Program]] = []

    def __init__(self, worker: Worker) -> None:
        require_possible(worker.plan)
        self.worker, self.state = worker, worker.prepare(ProgramState(), name=STATE)
        self.flat = FlatLoop(worker)
        parts_of(worker).executor.autocasts_body = False
        self.world = ProgramWorld(worker, kept=self.state.processes)
        self.state.processes = self.world.processes
        self.loaders = LoaderContext(worker, self.flat, self.world, self.state)

    @staticmethod
    def of(worker: Worker) -> _Program:
        """The program of this process; made at the first call."""
        if not _Program.opened or _Program.opened[0].worker is not worker:
            _Program.opened[:] = [_Program(worker)]
        return _Program.opened[0]


class Accelerator(ProgramMember):
    """A program's way to its run, with the names that Accelerate's examples use. The first one of a process joins.

    `gradient_accumulation_steps` batches of each process make a step. `mixed_precision` is "no", "bf16" or, where plans
    have it, "fp16". Raises PlanError for options that are not there, with the way that there is.

    Example::

        from paceline.compat.accelerate import Accelerator

        def begin():
            accelerator = Accelerator(gradient_accumulation_steps=2)
            accelerator.print(f"{accelerator.num_processes} processes on {accelerator.device}")
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = False,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        rng_types: Sequence[str] | None = None,
        kwargs_handlers: Sequence[Any] | None = None,
        **others: Any,
    ) -> None:
        refuse_options(others)
        job: dict[str, Any] = {"device": "cpu"} if cpu else {}
        worker = open_worker(plan=plan_of(mixed_precision), **job)
        program = _Program.of(worker)
        super().__init__(worker, program.flat, program.world)
        self._program, self._loaders = program, program.loaders
        self._state_hooks, self._handlers = StateHooks(worker), Handlers()
        self._handlers.take(kwargs_handlers or (), self._tell)
        plugin = gradient_accumulation_plugin or GradientAccumulationPlugin(num_steps=gradient_accumulation_steps)
        self.gradient_accumulation_steps = plugin.num_steps
        self._loaders.slots = lambda: self.gradient_accumulation_steps
        self._loaders.splits_batches = split_batches or (dataloader_config or DataLoaderConfiguration()).split_batches
        self._loaders.places = device_placement
        self._follows_optimizer = step_scheduler_with_optimizer
        self.project_configuration = project_config or ProjectConfiguration()
        if project_dir is not None and self.project_configuration.project_dir is None:
            self.project_configuration.set_directories(str(project_dir))
        if log_with is not None:
            self._tell_trackers(log_with)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"Accelerator.{name} is not in Paceline: {way_for(name)}")

    # What the loop is.

    @property
    def gradient_accumulation_steps(self) -> int:
        """Batches of each process that make a step."""
        return self._num_accumulated

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, number: int) -> None:
        if number < 1:
            raise PlanError(f"gradient_accumulation_steps is {number}; it must be at least 1.")
        self._num_accumulated = int(number)

    @property
    def mixed_precision(self) -> str:
        """In which numbers the forwards of models compute: "no", "bf16", "fp16" or "fp8"."""
        return PRECISIONS.get(self.worker.plan.compute.precision, "no")

    @property
    def native_amp(self) -> bool:
        """Whether that is another one than the model's own."""
        return self.mixed_precision != "no"

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch is that of all processes together."""
        return self._loaders.splits_batches

    @property
    def sync_gradients(self) -> bool:
        """Whether the present batch is the last of its step, so that the optimizer steps."""
        self._flat.follows_sync = True
        return self._flat.is_sync

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether the last step was left out on all workers, because its gradients were not finite."""
        return self._flat.was_skipped

    # Preparing.

    def prepare(self, *args: Any, device_placement: Sequence[bool] | None = None) -> Any:
        """Make models, optimizers, DataLoaders and schedulers part of the run; returns them in the order of the call.

        Models and optimizers are the same objects, which train in place. An operation of all workers.
        """
        models = [one for one in args if isinstance(one, nn.Module)]
        optimizers = [one for one in args if isinstance(one, Optimizer)]
        for model in models:
            self._prepare_model(model, optimizers)
        for optimizer in optimizers:
            self._prepare_optimizer(optimizer)
        prepared = tuple(self._prepare_other(one) for one in args)
        return prepared[0] if len(prepared) == 1 else prepared

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model."""
        return self.prepare(model)

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare an optimizer."""
        return self.prepare(optimizer)

    def prepare_data_loader(
        self, data_loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> Any:
        """Prepare a DataLoader."""
        return self.prepare(data_loader)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler."""
        return self.prepare(scheduler)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have objects with state_dict() and load_state_dict() in the states that are saved."""
        for one in objects:
            self.worker.prepare(one)

    def _prepare_model(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        if model in parts_of(self.worker).models:
            return
        names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
        self.worker.prepare(model)
        now = dict(model.named_parameters(remove_duplicate=False))
        for optimizer in optimizers:  # they were made before, and a layout may have replaced the parameters
            for group in optimizer.param_groups:
                group["params"] = [now[names[id(one)]] if id(one) in names else one for one in group["params"]]
        self._flat.follow(model)
        if self.mixed_precision != "no":
            have_forward_autocast(model, self.worker.plan.compute.precision, self.device, self._handlers.autocast)
        if not hasattr(model, "no_sync"):
            model.no_sync = cast("Any", contextlib.nullcontext)
        self._loaders.models.append(model)

    def _prepare_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer in parts_of(self.worker).prepared.registry.optimizers.values():
            return
        self.worker.prepare(optimizer)
        gate_optimizer(optimizer, self._flat)

    def _prepare_other(self, thing: Any) -> Any:
        if isinstance(thing, (nn.Module, Optimizer, PreparedLoader, PreparedScheduler)):
            return thing
        if isinstance(thing, DataLoader):
            return PreparedLoader(thing, self._loaders)
        if hasattr(thing, "step") and hasattr(thing, "state_dict"):
            times = 1 if self.split_batches else self._world.processes
            self.worker.prepare(thing)
            return PreparedScheduler(thing, self._flat, times=times, follows_optimizer=self._follows_optimizer)
        return thing

    # The loop.

    @contextlib.contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Around the body of a loop: gradients of `gradient_accumulation_steps` batches make a step."""
        self._flat.follows_sync = True
        yield

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Around batches whose gradients are not to be sent yet; here the last one of a step sends them."""
        yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Add a batch's gradient to its step's. After a step's last batch gradients are averaged over all workers."""
        if kwargs:
            raise TypeError(
                f"accelerator.backward(loss, {', '.join(kwargs)}) is not in Paceline: a micro-batch has one backward. "
                "For gradients of gradients, torch.autograd.grad(...) in the forward"
            )
        self._flat.backward(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Bound the norm of the averaged gradients; returns what it was. Inside of a step nothing is bounded."""
        found = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._flat.in_pass:
            return torch.nn.utils.get_total_norm([one.grad for one in found if one.grad is not None], norm_type)
        if not parts_of(self.worker).place.axes.is_split:
            known = self._flat.known_norm(found) if norm_type == 2 else None
            if known is None:
                return torch.nn.utils.clip_grad_norm_(found, max_norm, norm_type)
            norm = torch.tensor(known, device=self.device)
            torch.nn.utils.clip_grads_with_norm_(found, max_norm, norm)
            return norm
        if norm_type != 2:
            raise PlanError(
                f"clip_grad_norm_(norm_type={norm_type}) under {self.worker.plan.layout}: workers hold parts of the "
                "gradients, and only norms of type 2 are added up over them. Use norm_type=2, or replicas=n."
            )
        return self.worker.clip_gradients(max_norm)

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute a block in the run's precision, as the forwards of prepared models do.

        `AutocastKwargs(enabled=False)`: in single precision.
        """
        with autocasting(self.worker.plan.compute.precision, self.device, autocast_handler or self._handlers.autocast):
            yield

    @contextlib.contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Record a block with torch's profiler."""
        with (profile_handler or self._handlers.profile).build(self.worker.rank) as profiler:
            yield profiler

    def skip_first_batches(self, dataloader: PreparedLoader, num_batches: int = 0) -> PreparedLoader:
        """Have the next loop over a loader leave out so many batches; after `load_state` it goes on where that was."""
        return skip_first_batches(dataloader, num_batches)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget the models of earlier loops; returns as many None as it is given objects."""
        self._flat.close()
        self._loaders.models.clear()
        return [None for _ in objects]

    def clear(self, *objects: Any) -> list[None]:
        """The same."""
        return self.free_memory(*objects)

    # State.

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """Return the model, which is the program's own object."""
        return model

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Mapping[str, Any]:
        """Return the whole weights. Under layouts that split models, and with local SGD, all workers call it, and only
        the first gets them."""
        if loop_of(self.worker).between.has_whole_models:
            return model.state_dict()
        return self.worker.state_dict(model)

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | Path,
        max_shard_size: Any = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's whole weights into a folder, as safetensors. All workers call it."""
        if not safe_serialization:
            raise PlanError("save_model(safe_serialization=False) is not there: weights are written as safetensors.")
        self.worker.save_model(save_directory, model)

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, weights, output_dir)` called before a state is saved, until `.remove()` of what this
        returns. The state holds the models anyway. Raises PlanError under a layout that splits models."""
        return self._state_hooks.add_before_save(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Have `hook(models, input_dir)` called before a state is loaded. Raises PlanError likewise."""
        return self._state_hooks.add_before_load(hook)

    def save_state(self, output_dir: str | Path | None = None, **kwargs: Any) -> str:
        """Save everything that is prepared, the random state and the loaders' places into a directory, and into the
        run's checkpoints, between steps; returns the directory. All workers may call it, or the first alone, with a
        directory; under automatic names, with layouts that split models, local SGD and error feedback all must.

        Where the first alone could, the others return at once, and it waits for the writing no longer than a quarter of
        the job's `timeout_s`: what takes longer is complete some steps later, and the run's record says so.
        """
        project = self.project_configuration
        if output_dir is None and not project.automatic_checkpoint_naming:
            raise ValueError(
                "save_state() needs a directory, or ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        is_named = project.automatic_checkpoint_naming
        chosen = next_directory(self.worker, project) if is_named else Path(str(output_dir))
        self._state_hooks.call_before_save(self._loaders.models, chosen)
        save_state(self.worker, chosen)
        project.iteration += is_named
        return str(chosen)

    def load_state(self, input_dir: str | Path | None = None, **kwargs: Any) -> None:
        """Go on from a saved state, on any number of workers, before the first loop over a loader. The next loop over
        a loader goes on where the saved one was. All workers call it."""
        chosen = latest_directory(self.project_configuration) if input_dir is None else Path(input_dir)
        if self._program.loaders.num_streams:
            raise RuntimeError(
                f"load_state({str(chosen)!r}) after the program has begun to train: what all workers hold would change "
                "under a run that has counted its steps. Load weights: model.load_state_dict(...), or begin a new run"
            )
        self._state_hooks.call_before_load(self._loaders.models, chosen)
        load_state(self.worker, chosen, self._program.state)
        self._world.require_same(self._program.state.processes)
        self._program.state.processes = self._world.processes
        self._loaders.is_loaded = True

    # Options.

    def _tell_trackers(self, log_with: Any) -> None:
        job = parts_of(self.worker).files.assignment.job
        for one in log_with if isinstance(log_with, (list, tuple)) else [log_with]:
            name = getattr(one, "value", one)
            if name in ("wandb", "mlflow") and name not in job.log:
                self._tell(f"log_with={name!r}: the run's numbers go there with paceline run --log {name}")
            elif name not in ("wandb", "mlflow", "tensorboard", "all"):
                self._tell(f"log_with={name!r} is not used: a run has TensorBoard files, W&B and MLflow")


def skip_first_batches(dataloader: PreparedLoader, num_batches: int = 0) -> PreparedLoader:
    """Have the next loop over a prepared loader leave out so many batches of each worker."""
    if not isinstance(dataloader, PreparedLoader):
        raise TypeError(f"skip_first_batches() takes a loader that was prepared, not a {type(dataloader).__name__}")
    dataloader.begin_at(num_batches)
    return dataloader
