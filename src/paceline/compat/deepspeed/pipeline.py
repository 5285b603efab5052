"""`deepspeed.pipe`: a model as a list of layers, and an engine whose `train_batch` takes whole steps.

The model is built whole, as it is written; the plan's `stages` say which worker has which layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from paceline.compat.deepspeed.data import RepeatingLoader
from paceline.compat.deepspeed.engine import DeepSpeedEngine
from paceline.compat.deepspeed_files.config import DeepSpeedConfig
from paceline.compat.foreign_steps import open_batches
from paceline.errors import PlanError
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.stepper import Stepper
from paceline.worker.stateful_member import loop_of
from paceline.worker.worker import Worker

__all__ = ["LayerSpec", "PipelineEngine", "PipelineModule", "TiedLayerSpec"]


class LayerSpec:
    """A layer that is made later: its class, and what it is made with."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise PlanError(f"LayerSpec({typename!r}): the first argument must be a class of modules.")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self) -> nn.Module:
        """Make the layer."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer whose weights (`tied_weight_attr`) are those of all layers with the same key."""

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        """`forward_fn(layer, inputs)` is called in place of the layer."""
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


class _Function(nn.Module):
    """A function among layers, of the inputs or of a layer and the inputs."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer = layer
        self._function = function

    def forward(self, inputs: Any) -> Any:
        return self._function(inputs) if self.layer is None else self._function(self.layer, inputs)


class PipelineModule(nn.Module):
    """Layers that are run one after the other; each gets what the one before returns, tuples as several arguments.

    Not here: `topology`, partitions of one's own (`partition_method` is taken, and the plan divides layers by what they
    cost), and dynamic shapes: every micro-batch has the same.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Any = None,
        dynamic_shape: bool = False,
        use_reentrant: bool = True,
    ) -> None:
        """`num_stages`: workers that share the layers. Raises PlanError for `topology`, and without `num_stages`."""
        super().__init__()
        if topology is not None or num_stages is None:
            raise PlanError(
                "PipelineModule(topology=...) is not here: give num_stages; further axes are the plan's, such as "
                "--plan stages=2+shard=2+zero=1."
            )
        if num_stages < 1:
            raise PlanError(f"PipelineModule(num_stages={num_stages}): it must be at least 1.")
        self.num_stages, self.loss_fn = num_stages, loss_fn
        self.layers = nn.ModuleList()
        tied: dict[str, nn.Module] = {}
        self._keys: dict[int, str] = {}  # of tied layers, by their numbers
        for number, layer in enumerate(layers):
            if seed_layers:
                (seed_fn or torch.manual_seed)(base_seed + number)
            self.layers.append(_made(layer, tied))
            if isinstance(layer, TiedLayerSpec):
                self._keys[number] = layer.key
        if not len(self.layers):
            raise PlanError("PipelineModule(layers=[]): there is no layer.")
        self._interval = activation_checkpoint_interval
        self._checkpoint = activation_checkpoint_func

    def forward(self, inputs: Any) -> Any:
        for first in range(0, len(self.layers), self._interval or len(self.layers)):
            some = list(self.layers[first : first + (self._interval or len(self.layers))])
            if self._interval and self.training and torch.is_grad_enabled():
                inputs = self._checkpointed(some, inputs)
            else:
                inputs = _through(some, inputs)
        return inputs

    def _checkpointed(self, layers: Sequence[nn.Module], inputs: Any) -> Any:
        if self._checkpoint is not None:
            return self._checkpoint(lambda given: _through(layers, given), inputs)
        return checkpoint(lambda given: _through(layers, given), inputs, use_reentrant=False)

    def names_in_deepspeed(self, name: str) -> list[str]:
        """What DeepSpeed's checkpoints may call a tensor: "layers.2.weight" is "2.weight" there, and that of a tied
        layer has the name of their key, or of another one of them."""
        _, digits, rest = name.split(".", 2)
        number = int(digits)
        key = self._keys.get(number)
        if key is None:
            return [f"{number}.{rest}"]
        ends = dict.fromkeys((rest, rest.removeprefix("layer.")))  # `_Function` has its layer under this name
        same = [one for one, other in self._keys.items() if other == key]
        starts = [f"{number}", f"tied_modules.{key}", *map(str, same)]
        return [f"{start}.{end}" for start in starts for end in ends]

    def count_stages(self, workers: int) -> int:
        """The stages on so many workers. Raises PlanError where they do not divide them."""
        if workers % self.num_stages:
            raise PlanError(
                f"PipelineModule(num_stages={self.num_stages}) on {workers} workers: they must be a multiple of the "
                f"stages. Use --workers {self.num_stages * max(1, workers // self.num_stages)}."
            )
        return self.num_stages

    def prepare(self, worker: Worker, training_data: Any, collate: Callable[[list[Any]], Any] | None) -> None:
        """Have a worker place the layers; it runs them once, on two samples of `training_data` if there are any."""
        sample: Any = None
        if worker.plan.layout.stages > 1 and training_data is not None and hasattr(training_data, "__getitem__"):
            pair = (collate or torch.utils.data.default_collate)([training_data[0], training_data[1]])
            sample = (pair[0],)
        trained = [f"layers.{number}" for number, one in enumerate(self.layers) if any(True for _ in one.parameters())]
        worker.prepare(self, sample=sample, units=trained if worker.plan.layout.stages > 1 else ())


def _made(layer: Any, tied: dict[str, nn.Module]) -> nn.Module:
    if isinstance(layer, TiedLayerSpec):
        made = layer.build()
        first = tied.setdefault(layer.key, made)
        for name in layer.tied_weight_attr if first is not made else ():
            _set_tied(made, name, first)
        return made if layer.forward_fn is None else _Function(layer.forward_fn, made)
    if isinstance(layer, LayerSpec):
        return layer.build()
    if isinstance(layer, nn.Module):
        return layer
    if callable(layer):
        return _Function(layer)
    raise PlanError(
        f"PipelineModule: a layer is a {type(layer).__name__}; it must be a module, a LayerSpec or a function."
    )


def _set_tied(module: nn.Module, name: str, first: nn.Module) -> None:
    """Have a module's parameter, whose name may have dots, be the first one's."""
    path, _, last = name.rpartition(".")
    setattr(module.get_submodule(path), last, getattr(first.get_submodule(path), last))


def _through(layers: Sequence[nn.Module], inputs: Any) -> Any:
    for layer in layers:
        inputs = layer(inputs)
    return inputs


class PipelineEngine(DeepSpeedEngine):
    """An engine that takes whole steps: `train_batch` reads this worker's micro-batches, and trains on them."""

    _shuffles = False
    is_pipeline = True

    def __init__(
        self,
        worker: Worker,
        model: PipelineModule,
        config: DeepSpeedConfig,
        *,
        optimizer: Optimizer | None,
        schedule: Any,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        super().__init__(worker, model, config, optimizer=optimizer, schedule=schedule, collate=collate)
        self._pipeline, self._stepper = model, cast("Stepper | None", None)
        self._batches: Iterator[StepBatch] | None = None
        self._batch: StepBatch | None = None
        self._data: Iterator[Any] | None = None
        self._batch_fn: Callable[[Any], Any] | None = None

    def _begin_micro_batches(self, model: nn.Module) -> None:
        """A step's micro-batches go through the stages together: no forward of the program begins one."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Take one step on gradient_accumulation_steps micro-batches `(inputs, labels)` of each pipeline; returns their
        mean loss over all workers. `data_iter`: None reads the training data of `initialize`. All workers call it.

        Raises PlanError without a loss function, an optimizer or data, and SystemExit(0) after the run's last step.
        """
        if self.optimizer is None or self._pipeline.loss_fn is None:
            raise PlanError("train_batch() needs PipelineModule(loss_fn=...), and an optimizer in the configuration.")
        self._data = self._source(data_iter)
        if self._batches is None:
            self._stepper = self._worker.stepper(
                self.module, self.optimizer, self._pipeline.loss_fn, clip_norm=self.settings.clipping
            )
            self._batches = open_batches(self._worker, self._read)
            self._next_batch()
        stepper, batch = cast("Stepper", self._stepper), cast("StepBatch", self._batch)
        loss = stepper(batch)
        self._norm = stepper.grad_norm
        outcome = loop_of(self._worker).executor.outcome
        self.counts.micro_steps += self.gradient_accumulation_steps()
        self._finish_step(is_taken=outcome is not None and outcome.is_taken)
        self._next_batch()
        return loss.float()

    def eval_batch(
        self,
        data_iter: Iterator[Any],
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor:
        """Return the mean loss over as many micro-batches as a step has, without training; all workers call it.
        Training goes on with its own data.

        Raises PlanError for outputs: `return_logits`, and `compute_loss=False`.
        """
        loss_fn = self._pipeline.loss_fn
        if return_logits or not compute_loss or reduce_output != "avg" or loss_fn is None:
            raise PlanError(
                "eval_batch(return_logits=..., compute_loss=False, reduce_output=...): it returns the mean of loss_fn. "
                "worker.evaluate(model, dataset, measures) of a training function measures outputs."
            )
        data = iter(data_iter)
        own = [self._next_micro(data) for _ in range(num_micro_batches or self.gradient_accumulation_steps())]
        each = self._worker.plan.layout.workers_each
        micros = [one for held in self._worker.gather(own)[::each] for one in held] if self.world_size > each else own
        found = self._worker.evaluate(self.module, micros, {"loss": loss_fn}, micro=1, collate=lambda some: some[0])
        return torch.tensor(found["loss"])

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Read steps from this loader, again and again."""
        self._data = RepeatingLoader(loader)

    def set_dataiterator(self, iterator: Iterator[Any]) -> None:
        """Read steps from this iterator."""
        self._data = iterator

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Make `(inputs, labels)` of what the data gives by this function."""
        self._batch_fn = fn

    def is_first_stage(self) -> bool:
        """Whether this worker has the first layers."""
        return self.global_rank % self._worker.plan.layout.stages == 0

    def is_last_stage(self) -> bool:
        """Whether this worker has the last layers."""
        stages = self._worker.plan.layout.stages
        return self.global_rank % stages == stages - 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise PlanError("A pipeline's engine takes whole steps: engine.train_batch(), or engine.eval_batch(data_iter).")

    def backward(self, loss: Tensor, **options: Any) -> Tensor:
        raise PlanError("A pipeline's engine takes whole steps: engine.train_batch(), or engine.eval_batch(data_iter).")

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        raise PlanError("A pipeline's engine takes whole steps: engine.train_batch(), or engine.eval_batch(data_iter).")

    def _source(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        if data_iter is not None:
            return data_iter
        if self._data is not None:
            return self._data
        if self.training_dataloader is None:
            raise PlanError(
                "train_batch() has no data: every worker gives train_batch(data_iter), or "
                "initialize(training_data=...)."
            )
        return RepeatingLoader(self.training_dataloader)

    def _next_micro(self, data: Iterator[Any]) -> Any:
        try:
            micro = next(data)
        except StopIteration:
            raise RuntimeError(
                "the data ended within a step: it needs gradient_accumulation_steps micro-batches. "
                "RepeatingLoader(loader) has no end"
            ) from None
        micro = micro if self._batch_fn is None else self._batch_fn(micro)
        return tuple(micro) if isinstance(micro, list) else micro

    def _read(self, numbers: list[int]) -> Any:
        return self._next_micro(cast("Iterator[Any]", self._data))

    def _next_batch(self) -> None:
        self._batch = next(cast("Iterator[StepBatch]", self._batches), None)
        if self._batch is None:
            raise SystemExit(0)  # max_steps: an end like any other
