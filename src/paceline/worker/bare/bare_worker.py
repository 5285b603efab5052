"""The worker of the plain torch loop: what a training function is given by `paceline parity --bare`.

It has the methods of `Worker` and does with them what a script without Paceline would write: backward of each
micro-batch, `clip_grad_norm_`, `optimizer.step()`. A method that it lacks raises PlanError by name.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import PlanError
from paceline.events import Evaluated, Event, Reported, StepDone
from paceline.plan import Plan
from paceline.schedule.micro_batches import micro_batches
from paceline.worker.bare.bare_batches import BareBatch, bare_batches
from paceline.worker.bare.bare_step import BarePass, BareStepper
from paceline.worker.data import random_state
from paceline.worker.data.data_loading import fetch_samples
from paceline.worker.data.evaluation_data import read_evaluation
from paceline.worker.record.parity_capture import ParityCapture

__all__ = ["BareWorker"]

T = TypeVar("T")


class BareWorker:
    """One process, a plain torch loop, and the names of `Worker`."""

    rank = 0
    workers = 1
    is_first = True

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        *,
        capture: ParityCapture,
        emit: Callable[[Event], None],
        max_steps: int | None,
    ) -> None:
        self.plan, self.device, self.step = plan, device, 0
        self._capture, self._emit, self._max_steps = capture, emit, max_steps
        self._pass = BarePass(plan, device)
        self._models: dict[str, nn.Module] = {}
        self._optimizers: dict[str, Optimizer] = {}
        self._names: set[str] = set()
        self._streams: set[str] = set()
        self._latest: BareBatch | None = None
        self._metrics: dict[str, float] = {}
        self._is_in_stepper = False

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise PlanError(
            f"the script uses worker.{name}, which the plain torch loop of `paceline parity --bare` does not have. "
            "Compare without --bare, or leave the call out where worker.workers is 1."
        )

    def prepare(self, thing: T, *, name: str | None = None, buffers: Mapping[str, str] | None = None, **_: Any) -> T:
        """Move and convert a model; take note of an optimizer; leave everything else as it is."""
        if isinstance(thing, nn.Module):
            if self.plan.compute.precision == "fp8":
                raise PlanError(
                    "the plain torch loop of `paceline parity --bare` has no precision='fp8'. Compare without --bare, "
                    "or with precision='bf16'."
                )
            if self.plan.compute.precision == "fp64":
                thing.double()
            thing.to(self.device)
            known = self._models[self._new_name("model", name)] = thing
            self._pass.buffers.add(next(reversed(self._models)), known, buffers or {})
        elif isinstance(thing, Optimizer):
            self._optimizers[self._new_name("optimizer", name)] = thing
            thing.register_step_pre_hook(self._before_optimizer)  # pyrefly: ignore[bad-argument-type]
            thing.register_step_post_hook(self._after_optimizer)  # pyrefly: ignore[bad-argument-type]
        elif isinstance(held := getattr(thing, "_state", None), Optimizer):  # an ExponentialMovingAverage
            self._optimizers[self._new_name("average", name)] = held
        return thing

    def stepper(
        self,
        model: Any,
        optimizer: Any,
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        forward: Callable[[Any, Any], Any] | None = None,
        clip_norm: float | None = None,
        **unknown: Any,
    ) -> BareStepper:
        """Return `step(batch)`."""
        if unknown:
            raise PlanError(
                f"worker.stepper({', '.join(unknown)}=...): the plain torch loop of `paceline parity --bare` has no "
                "such option. Compare without --bare."
            )

        def loss_of(micro: Any) -> Any:
            return forward(model, micro) if forward is not None else loss(model(micro[0]), micro[1])  # type: ignore[misc]  # one of the two is given

        models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        return BareStepper(
            self._pass,
            models=models,
            optimizers=optimizers,
            loss_of=loss_of,
            clip_norm=clip_norm,
            begin=self._begin_pass,
            stepping=self._stepping,
            commit=self._commit,
        )

    def batches(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        collate: Any = None,
        name: str | None = None,
        weights: Sequence[float] | Tensor | None = None,
        lengths: Sequence[float] | Tensor | None = None,
        collate_fn: Any = None,
        loaders: int | None = None,
        prefetch: int | None = None,
        num_workers: int | None = None,
    ) -> Iterator[BareBatch]:
        """Yield one batch a step; this process reads the data, whatever `loaders` says."""
        number = 1
        while name is None:
            candidate = "train" if number == 1 else f"train_{number}"
            name = None if candidate in self._streams else candidate
            number += 1
        self._streams.add(name)
        found = bare_batches(
            dataset,
            self.plan.batch,
            stream=name,
            epochs=epochs,
            collate=collate or collate_fn,
            weights=weights,
            lengths=lengths,
            run_pass=self._run_plain,
        )
        return self._handed_out(found)

    def backward(self, loss: Any) -> None:
        """Add a micro-batch's gradient, in the script's own loop."""
        self._pass.backward(loss)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Bound the global norm of the gradients; returns it."""
        return nn.utils.clip_grad_norm_([p for model in self._models.values() for p in model.parameters()], max_norm)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        measures: Any,
        *,
        micro: int | None = None,
        collate: Any = None,
        forward: Any = None,
        collate_fn: Any = None,
    ) -> dict[str, float]:
        """Return means over a dataset."""
        began, named = time.perf_counter(), measures if isinstance(measures, Mapping) else {"loss": measures}
        data = read_evaluation(
            dataset, micro=micro, collate=collate or collate_fn, default_micro=self.plan.batch.resolved_micro
        )
        dataset, sums = data.dataset, {name: [0.0, 0.0] for name in named}
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        with torch.no_grad(), random_state.PreservedRandomState():
            for part in micro_batches(0, len(dataset), data.micro):
                random_state.seed_all(self.plan.batch.seed, 4, self.step, part.index)
                items = fetch_samples(dataset, list(range(part.start, part.stop)))
                moved = self._pass.moved(data.collate(items))
                random_state.seed_all(self.plan.batch.seed, 4, self.step, part.index)
                with self._pass.computing():
                    output, target = forward(model, moved) if forward else (model(moved[0]), moved[1])
                    for name, measure in named.items():
                        value = measure(output, target)
                        pair = (
                            value if isinstance(value, (tuple, list)) else (value * part.num_samples, part.num_samples)
                        )
                        sums[name] = [sums[name][0] + float(pair[0]), sums[name][1] + float(pair[1])]
        for module, mode in modes:
            module.training = mode
        found = {name: total / count if count else float("nan") for name, (total, count) in sums.items()}
        took_s = time.perf_counter() - began
        self._emit(Evaluated(step=self.step, num_samples=len(dataset), metrics=found, duration_s=took_s))
        return found

    def report(self, **metrics: float | Tensor) -> None:
        """Note values of the step."""
        values = {name: float(value) for name, value in metrics.items()}
        if self._latest is None:
            self._emit(Reported(step=self.step, metrics=values))
        self._metrics.update(values)

    def average(self, value: Tensor | float) -> Tensor:
        """The value of the one process."""
        return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)

    def gather(self, value: T) -> list[T]:
        """The value of the one process."""
        return [value]

    def wait(self) -> None:
        """There is no other process."""

    def save(self) -> None:
        """Nothing is saved."""

    def restore(self, path: str | None = None) -> int:
        """Nothing is restored."""
        return 0

    def end(self) -> None:
        """Write down what the training function has left."""
        self._capture.weights(self._models, _as_is)
        self._capture.optimizers(self._optimizers, self._parameter_names(), _as_is)

    def _handed_out(self, found: Iterator[BareBatch]) -> Iterator[BareBatch]:
        for batch in found:
            if self._max_steps is not None and self.step >= self._max_steps:
                return
            self._latest, self._metrics = batch, {}
            try:
                yield batch
            finally:
                self._latest = None
            if not batch.is_committed:
                self._count(batch)
            self._report(batch)

    def _run_plain(self, batch: BareBatch) -> Iterator[Any]:
        """The script's own loop over a batch's micro-batches."""
        self._begin_pass(batch)
        yield from self._pass.run(batch)
        parameters = [p for model in self._models.values() for p in model.parameters()]
        if not self._pass.finish(parameters):
            for parameter in parameters:
                parameter.grad = None
        if batch.loss is None:
            batch.loss = self._pass.loss

    def _begin_pass(self, batch: BareBatch) -> None:
        if not batch.is_committed:
            batch.step = self.step + 1

    @contextlib.contextmanager
    def _stepping(self) -> Iterator[None]:
        self._is_in_stepper = True
        try:
            yield
        finally:
            self._is_in_stepper = False

    def _commit(self, batch: BareBatch) -> None:
        if batch.loss is None:
            batch.loss = self._pass.loss
        if not batch.is_committed:
            self._count(batch)

    def _count(self, batch: BareBatch) -> None:
        self.step += 1
        batch.step, batch.is_committed = self.step, True

    def _report(self, batch: BareBatch) -> None:
        if batch.loss is not None:
            self._capture.loss(batch.step, batch.loss)
        done = StepDone(
            step=batch.step,
            epoch=batch.epoch,
            num_samples=batch.num_samples,
            loss=batch.loss,
            metrics=dict(self._metrics),
            seconds={"total": 0.0},
            optimizer={"loss_scale": self._pass.used_scale} if self.plan.compute.precision == "fp16" else {},
        )
        self._emit(done)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._latest is not None:
            names = self._parameter_names()
            parameters = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
            self._capture.gradients(self._latest.step, parameters, _as_is)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._latest is not None and not self._is_in_stepper:
            self._commit(self._latest)

    def _parameter_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for prefix, model in self._models.items():
            for name, parameter in model.named_parameters():
                names.setdefault(id(parameter), f"{prefix}.{name}")
        return names

    def _new_name(self, kind: str, wanted: str | None) -> str:
        number = 1
        while wanted is None:
            candidate = kind if number == 1 else f"{kind}_{number}"
            wanted = None if candidate in self._names else candidate
            number += 1
        self._names.add(wanted)
        return wanted


def _as_is(name: str, tensor: Tensor | None) -> Tensor | None:
    """Everything is whole in one process."""
    return tensor
