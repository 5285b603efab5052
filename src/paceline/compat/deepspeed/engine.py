"""The engine of a DeepSpeed program: forward, backward and step go over the run's own steps.

`engine(batch)` begins a micro-batch of the step that is due, `engine.backward(loss)` adds its gradient, and
`engine.step()` ends the step after the last micro-batch of this worker. There all workers agree on the gradients, clip
them, and step the optimizer and its schedule, or leave the step out together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.compat.deepspeed.data import MicroBatchLoader
from paceline.compat.deepspeed.engine_checkpoints import EngineCounts, SavedEngine, load_engine, save_engine
from paceline.compat.deepspeed.loss_routing import LossRouting
from paceline.compat.deepspeed.original_checkpoints import convert_original
from paceline.compat.deepspeed.refusals import OF_ENGINE
from paceline.compat.deepspeed.run_monitor import Monitor
from paceline.compat.deepspeed.shared_steps import SharedSteps
from paceline.compat.deepspeed.sharing import add_engine, forget_engines, has_engines, others_unchanged
from paceline.compat.deepspeed_files.config import DeepSpeedConfig
from paceline.compat.foreign_steps import ForeignSteps
from paceline.errors import PlanError
from paceline.events import Note
from paceline.worker.program_worker import at_program_end
from paceline.worker.run_member import parts_of
from paceline.worker.worker import Worker

__all__ = ["DeepSpeedEngine"]


class DeepSpeedEngine(nn.Module):
    """A model that trains in a program's loop, with DeepSpeed's names. `initialize` makes it."""

    _shuffles = True  # its training data
    is_pipeline = False

    def __init__(
        self,
        worker: Worker,
        model: nn.Module,
        config: DeepSpeedConfig,
        *,
        optimizer: Optimizer | None,
        schedule: Any,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer, self.lr_scheduler = optimizer, schedule
        self.training_dataloader: MicroBatchLoader | None = None
        self.device, self.global_rank, self.world_size = worker.device, worker.rank, worker.workers
        self.local_rank = parts_of(worker).files.assignment.local_rank
        self.monitor = Monitor(worker)
        self.counts = EngineCounts()
        self.collate_fn = collate
        self._worker, self.settings, self._norm = worker, config, cast("Tensor | None", None)
        self._steps: ForeignSteps | SharedSteps = ForeignSteps(worker)
        self._routing: LossRouting | None = None
        self._is_applied = False
        self._num_ended = 0  # micro-batches of the step
        self._waiting: list[SavedEngine] = []  # saves that were asked for within a step
        if optimizer is not None:
            if not has_engines():
                self._begin_micro_batches(model)
            add_engine(self, worker)
            at_program_end(self._end)

    def _begin_micro_batches(self, model: nn.Module) -> None:
        """Have each forward of the model that trains begin a micro-batch, and `loss.backward()` be the engine's."""
        self._routing = LossRouting(model, cast("ForeignSteps", self._steps))
        self._routing.begin()

    def share_steps(self, steps: SharedSteps) -> None:
        """Take steps in turn with other engines from now on: forwards and backwards are torch's own."""
        if self._routing is not None:
            self._routing.end()
        self._routing, self._steps = None, steps

    # The three calls of a loop.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Where it trains this begins the next micro-batch of the step."""
        inputs, named = self._steps.move(args), self._steps.move(kwargs)
        if self.module.training and torch.is_grad_enabled() and self._routing is not None:
            self._routing.open_micro()  # before the precision of the forward, which is the micro-batch's
            return self.module(*inputs, **named)
        with self._steps.computing():
            return self.module(*inputs, **named)

    def backward(self, loss: Tensor, **options: Any) -> Tensor:
        """Add the gradient of a micro-batch's loss, its mean. Raises RuntimeError for a second one, and ValueError for
        options that change what a gradient is."""
        unknown = [name for name, value in options.items() if name not in _BACKWARD or value != _BACKWARD[name]]
        if unknown:
            raise ValueError(
                f"engine.backward({', '.join(f'{name}={options[name]!r}' for name in unknown)}) is not here"
            )
        self._require_optimizer()
        self._steps.backward(loss)
        return loss

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End the micro-batch, and after the last one the step: all workers agree, clip, and step the optimizer.

        Raises SystemExit(0) after the run's last step (max_steps).
        """
        optimizer = self._require_optimizer()
        self._steps.end_micro()
        self.counts.micro_steps += 1
        self._num_ended += 1
        if not self._steps.is_at_end:
            return
        end = self._steps.finish(optimizer, self.settings.clipping)
        self._norm = self._norm if end.norm is None else end.norm
        self._num_ended = 0
        self._finish_step(is_taken=end.is_taken, lr_kwargs=lr_kwargs)
        self._save_waiting()
        self._steps.advance()

    def _require_optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise RuntimeError(
                "this engine has no optimizer: name one in the configuration, or pass one to initialize()"
            )
        return self.optimizer

    def _finish_step(self, *, is_taken: bool, lr_kwargs: dict[str, Any] | None = None) -> None:
        self._is_applied = is_taken
        if not is_taken:
            self.counts.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        self.counts.global_steps += 1
        self.counts.global_samples += self.settings.batch.train
        every = self.settings.steps_per_print
        if every and self.counts.global_steps % every == 0 and self.global_rank == 0:
            print(
                f"step={self.counts.global_steps}, skipped={self.counts.skipped_steps}, lr={self.get_lr()}, "
                f"mom={self.get_mom()}",
                flush=True,
            )

    # What a loop asks.

    @property
    def has_begun(self) -> bool:
        """Whether a first forward that trains has come."""
        return self._steps.has_begun

    @property
    def global_steps(self) -> int:
        """Steps since the beginning of the run."""
        return self.counts.global_steps

    @property
    def global_samples(self) -> int:
        """Samples of these steps, over all workers."""
        return self.counts.global_samples

    @property
    def micro_steps(self) -> int:
        """Micro-batches of this worker in these steps, and in the one under way."""
        return self.counts.micro_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that no worker took, because a gradient was not finite."""
        return self.counts.skipped_steps

    @property
    def dp_world_size(self) -> int:
        """Workers that get micro-batches of their own."""
        return self.world_size // self._worker.plan.layout.stages

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, as it was written."""
        return dict(self.settings.table)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` ends the step: the micro-batch is this worker's last one of it."""
        return self._num_ended + 1 == self.gradient_accumulation_steps()

    def was_step_applied(self) -> bool:
        """Whether the last step was taken, and not left out."""
        return self._is_applied

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of a worker in a step."""
        return self.settings.batch.accumulation

    def train_batch_size(self) -> int:
        """Samples of a step over all workers."""
        return self.settings.batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples of a micro-batch."""
        return self.settings.batch.micro

    def get_batch_info(self) -> tuple[int, int, int]:
        """Samples of a step, samples of a micro-batch, and micro-batches of a worker in a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def gradient_clipping(self) -> float:
        """The largest norm of a step's gradients; 0: they are not clipped."""
        return self.settings.clipping or 0.0

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradients before they were clipped; None before the first step."""
        return None if self._norm is None else float(self._norm)

    def steps_per_print(self) -> int | None:
        """Steps between two lines about the progress."""
        return self.settings.steps_per_print

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage of the run's plan; 0: whole replicas."""
        layout = self._worker.plan.layout
        return layout.zero if layout.shard > 1 else 0

    def zero_optimization(self) -> bool:
        """Whether the run's plan shards state."""
        return self.zero_optimization_stage() > 0

    def bfloat16_enabled(self) -> bool:
        """Whether forwards compute in bf16."""
        return self._worker.plan.compute.precision in ("bf16", "fp8")

    def fp16_enabled(self) -> bool:
        """Whether forwards compute in fp16."""
        return str(self._worker.plan.compute.precision) == "fp16"

    def get_lr(self) -> list[float]:
        """The learning rates of the optimizer's groups."""
        return [] if self.optimizer is None else [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_mom(self) -> list[Any]:
        """Momentum, or both betas, of the optimizer's groups."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def optimizer_name(self) -> str | None:
        """The class of the optimizer."""
        return None if self.optimizer is None else type(self.optimizer).__name__.lower()

    def scheduler_name(self) -> str | None:
        """The class of the schedule."""
        return None if self.lr_scheduler is None else type(self.lr_scheduler).__name__

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove gradients, where no step is under way: in one they are the step's."""
        if not self._steps.is_under_way:
            self.module.zero_grad(set_to_none)

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Have the model train, or not."""
        self.training = mode
        self.module.train(mode)
        return self

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Iterable[int] | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> MicroBatchLoader:
        """Return a loader of this worker's micro-batches of a dataset. `route` "train" shuffles them, but for a
        pipeline's."""
        stages = self._worker.plan.layout.stages
        return MicroBatchLoader(
            dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            workers=self.dp_world_size,
            index=self.global_rank // stages,
            sampler=data_sampler,
            shuffle=route == "train" and self._shuffles,
            collate=collate_fn or self.collate_fn,
            loaders=num_local_io_workers or 0,
            drop_last=self.settings.drop_last,
        )

    # State.

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The model's whole weights, as `module_state_dict`."""
        return self.module_state_dict()

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The whole weights under the model's own names. Under a plan that splits them the first worker alone gets
        them; all workers call it."""
        split = self._worker.plan.layout.workers_each > 1
        found = self._worker.state_dict(self.module) if split else dict(self.module.state_dict())
        if not exclude_frozen_parameters:
            return found
        frozen = {name for name, one in self.module.named_parameters() if not one.requires_grad}
        return {name: value for name, value in found.items() if name not in frozen}

    def load_module_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole weights, under whole replicas. Raises PlanError under a plan that splits them."""
        if self._worker.plan.layout.workers_each > 1:
            raise PlanError(
                f"load_module_state_dict() under {self._worker.plan}: each worker has a part of the weights. Load them "
                "before initialize(), or a checkpoint by load_checkpoint()."
            )
        self.module.load_state_dict(state_dict, strict=strict)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the run's state, and `client_state`, in `save_dir/tag`; all workers call it. See `save_engine`.

        A step that is under way is taken before, or, where the program ends, left out.
        """
        chosen = tag or f"global_step{self.global_steps}"
        save = SavedEngine(Path(save_dir), chosen, client_state or {}, is_latest=save_latest)
        if self._steps.is_under_way:
            self._waiting.append(save)
        else:
            save_engine(self._worker, save)
        return True

    def _save_waiting(self) -> None:
        while self._waiting:
            save_engine(self._worker, self._waiting.pop(0))

    def _end(self) -> None:
        """The program is over: what it has wanted to save in a step that did not end is the state before that step."""
        if self._routing is not None:
            self._routing.end()
        forget_engines()
        if self._waiting:
            self._steps.close()
            self._save_waiting()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Go on from what `save_checkpoint` wrote, here or in DeepSpeed itself; returns its folder and its
        `client_state`, or (None, {}).

        Raises RuntimeError after the first forward that trains, PlanError for `custom_load_fn` and for
        `load_module_strict=False`, and CheckpointError where the checkpoint does not fit.
        """
        if self._steps.has_begun:
            raise RuntimeError("engine.load_checkpoint() must come before the first forward that trains")
        if custom_load_fn is not None or not load_module_strict:
            raise PlanError(
                "load_checkpoint(custom_load_fn=..., load_module_strict=False): a checkpoint is loaded whole. To take "
                "parts of it, write its weights by `paceline export`, and load them before initialize()."
            )
        is_whole = load_optimizer_states and not load_module_only
        schedule = None if load_lr_scheduler_states and not load_module_only else self.lr_scheduler
        with others_unchanged(self):
            return load_engine(
                self._worker,
                Path(load_dir),
                tag,
                functools.partial(convert_original, worker=self._worker, engine=self, with_optimizer=is_whole),
                fresh_optimizer=None if is_whole else self.optimizer,
                fresh_schedule=schedule,
                fresh_counts=self.counts if load_module_only else None,
            )

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the whole weights in bf16, or in fp16 where that is the plan's precision; all workers call it."""
        self._require_between_steps("save_16bit_model()")
        weights = self._worker.state_dict(self.module)
        if self._worker.is_first:
            kind = torch.float16 if self.fp16_enabled() else torch.bfloat16
            half = {key: one.to(kind) if one.is_floating_point() else one for key, one in weights.items()}
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            torch.save(half, Path(save_dir) / save_filename)
        self._worker.wait()
        return True

    save_fp16_model = save_16bit_model

    def _require_between_steps(self, what: str) -> None:
        if self._steps.is_under_way:
            raise RuntimeError(
                f"engine.{what} within a step: call it after the engine.step() that ends one "
                "(engine.global_steps counts them)"
            )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """The plan compiles a model: see compute(compile=true). Here this says so once, and does nothing."""
        self._note("engine.compile() does nothing here: compute(compile=true) of the plan compiles the model")

    def destroy(self) -> None:
        """Leave the steps. The run ends with the program."""
        if self._routing is not None:
            self._routing.end()
        self._steps.close()

    def _note(self, text: str) -> None:
        if self._worker.is_first:
            parts_of(self._worker).files.emit(Note(text=text))

    def __getattr__(self, name: str) -> Any:
        """What DeepSpeed's engine has and this one lacks is refused by name; all else is the model's own."""
        if name in OF_ENGINE:
            raise PlanError(f"engine.{name} is not here: {OF_ENGINE[name]}.")
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None or name.startswith("__"):
                raise
        try:
            return getattr(module, name)
        except AttributeError:
            raise AttributeError(
                f"the engine has no {name!r}, nor has its {type(module).__name__}. What it has is in "
                "docs/how-to/bring-your-deepspeed-program.md"
            ) from None


_BACKWARD: dict[str, object] = {"retain_graph": False, "scale_wrt_gas": True, "allreduce_gradients": True}
