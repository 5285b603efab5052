"""The worker: what a training function is given, and all it needs.

One object per process. It owns the transaction: `walk` is its inside, `commit` its end; between steps the loop *turns*
(`_turn`): what was reported is emitted, and a checkpoint is saved where one is due. Every public method is called by
all workers, in the same order, unless it says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from paceline.comm.group import WorkerGroup
from paceline.events import Evaluated, Note, Reported, StepDone, StreamOpened, Warned
from paceline.parallel.apply import place
from paceline.plan import Plan
from paceline.sync.allreduce import GradientSum
from paceline.worker.batch import StepBatch
from paceline.worker.evaluation import Measure, evaluate
from paceline.worker.preparing import Preparation
from paceline.worker.reading import Collate
from paceline.worker.record import RunFiles
from paceline.worker.stepper import Stepper, pair_loss
from paceline.worker.stream import Source, Stream
from paceline.worker.walk import LossLike, Outcome, Walks

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """One process of a run, normally with one device."""

    def __init__(
        self, *, plan: Plan, group: WorkerGroup, device: torch.device, files: RunFiles, host: str, timeout_s: float
    ) -> None:
        self.plan = plan
        self.device = device
        self.rank = group.index
        self.workers = group.size
        self.replica = group.index
        self.host = host
        self.step = 0  # committed steps, of all attempts
        self._group, self._files, self._timeout_s = group, files, timeout_s
        self._walks = Walks(plan, group=group, device=device)
        self._prepared = Preparation(plan, group=group, device=device, buffers=self._walks.buffers, files=files)
        self._gradients: dict[nn.Module, GradientSum] = {}
        self._streams: dict[str, Stream] = {}
        self._current: _Step | None = None
        self._told: set[str] = set()
        self._turned_at = time.perf_counter()
        self._num_bytes_before = 0
        self._num_batches = 0
        self._saved_at_step = -1
        self._resume()

    def prepare(self, thing: T, *, name: str | None = None) -> T:
        """Make a model, optimizer, scheduler or other stateful object part of the run; returns the same object.

        A model is converted, moved and wrapped in place as the plan says, and gets worker 0's weights. Prepare models
        before their optimizers, and optimizers before their schedulers. What has `state_dict` and `load_state_dict`
        goes into checkpoints under `name` (by default "model", "optimizer", "scheduler", "object", then "model_2", ...)
        and comes back from them.
        """
        if isinstance(thing, nn.Module):
            self._prepare_model(thing, name)
        elif isinstance(thing, Optimizer):
            self._prepared.optimizer(thing, name)
            thing.register_step_pre_hook(self._before_optimizer)
            thing.register_step_post_hook(self._after_optimizer)
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self._prepared.other(thing, name)
        else:
            raise TypeError(
                f"worker.prepare() got a {type(thing).__name__}; it takes models, optimizers, schedulers and "
                "whatever has "
                "state_dict() and load_state_dict(). Data goes to worker.batches()"
            )
        return thing

    def stepper(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        forward: Callable[[Any, Any], Any] | None = None,
        clip_norm: float | None = None,
    ) -> Stepper:
        """Return `step(batch) -> loss`: forward, backward, agree, clip, commit.

        `loss(output, target)` serves (input, target) batches; `forward(model, micro)` serves everything else. Either
        returns the mean over the micro-batch, or (sum, count), for example over tokens. `clip_norm` bounds the global
        norm of the averaged gradient.
        """
        models = [model] if isinstance(model, nn.Module) else list(model)
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        for one in models:
            if one not in self._gradients:
                raise ValueError(
                    f"worker.stepper() got a {type(one).__name__} that was not prepared: model = worker.prepare(model)"
                )
        for one in optimizers:
            if one not in self._prepared.registry.optimizers.values():
                raise ValueError(
                    f"worker.stepper() got {type(one).__name__} that was not prepared: optim = worker.prepare(optim)"
                )
            if isinstance(one, torch.optim.LBFGS):
                raise ValueError(
                    "LBFGS evaluates the loss many times per step and cannot be used with a stepper; use a "
                    "first-order optimizer"
                )
        if (loss is None) == (forward is None):
            raise ValueError("worker.stepper() needs either loss=fn(output, target) or forward=fn(model, micro)")
        if clip_norm is not None and clip_norm <= 0:
            raise ValueError(f"clip_norm is {clip_norm}; it must be more than 0, or None for no clipping")
        if forward is not None:
            loss_of = _bound(forward, model)
        elif len(models) > 1:
            raise ValueError("a stepper over several models needs forward=fn(models, micro)")
        else:
            loss_of = pair_loss(models[0], cast("Callable[[Any, Any], Any]", loss))
        return Stepper(
            self,
            optimizers=optimizers,
            gradients=[self._gradients[one] for one in models],
            loss_of=loss_of,
            clip_norm=clip_norm,
        )

    def batches(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        collate: Collate = default_collate,
        loaders: int = 0,
        prefetch: int = 2,
        name: str | None = None,
    ) -> Iterator[StepBatch]:
        """Yield one item a step: this worker's micro-batches of the global batch, from where the run stands.

        `loaders` processes read ahead, `prefetch` micro-batches each (0: this process reads). `name` tells streams
        apart in checkpoints and the ledger; by default "train", then "train_2", ...
        """
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1")
        if loaders < 0 or prefetch < 1:
            raise ValueError(f"loaders={loaders}, prefetch={prefetch}: loaders must be 0 or more, prefetch 1 or more")
        name = name or _unused("train", self._streams)
        if name in self._streams:
            raise ValueError(f"a stream named {name!r} exists already; give each call of worker.batches() its own name")
        cursor = self._prepared.cursor(name)
        source = Source(
            dataset=dataset,
            epochs=epochs,
            collate=collate,
            loaders=loaders,
            prefetch=prefetch,
            pin=self.device.type == "cuda",
            name=name,
        )
        stream = Stream(
            source, self.plan.batch, cursor=cursor, group=self._group, walk=self._plain_walk, timeout_s=self._timeout_s
        )
        self._streams[name] = stream
        self._prepared.begin_training()
        self._files.ledger.opened(name, **stream.about())
        self._files.emit(
            StreamOpened(
                name=name, num_samples=stream.num_samples, epochs=epochs, last_step=stream.last_step(self.step)
            )
        )
        return self._steps(stream)

    def _steps(self, stream: Stream) -> Iterator[StepBatch]:
        for batch in stream.steps(lambda: self.step + 1):
            if self._files.is_last_step(self.step):
                return
            self._num_batches += 1
            batch.serial = self._num_batches
            self._current = _Step(batch, stream)
            try:
                yield batch
            except GeneratorExit:
                # The user left the loop, by `break` or by an error on its way: what was not committed did not happen.
                self._leave()
                raise
            self._turn()

    def _turn(self) -> None:
        """The end of a pass through the user's loop: everything the user does in a step has been done."""
        current, self._current = self._current, None
        if current is None:
            return
        if not current.is_committed:
            self._advance(current, skipped=True)  # the user took no step: the samples count as seen
        else:
            self._emit_step(current)
        if self._files.is_save_due(self.step) and self._saved_at_step != self.step:
            self.save()
        elif self._files.saves_regularly:
            self._prepared.warm()

    def _leave(self) -> None:
        """The loop was left before its end, or in an error: tell what was committed, and forget the rest."""
        current, self._current = self._current, None
        if current is not None and current.is_committed:
            self._emit_step(current)

    # ----------------------------------------------------------------------------------------------------------------

    def backward(self, loss: LossLike) -> None:
        """Add a micro-batch's gradient, in the plain loop; `loss` is the mean over the micro-batch, or (sum, count).

        Gradients are averaged over all workers when the walk over the batch ends: then clip if you like,
        `optim.step()`, `optim.zero_grad()`.
        """
        self._walks.backward(loss)

    def walk(
        self,
        batch: StepBatch,
        gradients: Sequence[GradientSum],
        loss_of: Callable[[Any], Any],
        *,
        is_finite: Callable[[], bool] | None,
    ) -> Outcome:
        """Walk over a batch for a stepper; returns what all workers agreed on."""
        began, data_s = time.perf_counter(), batch.data_s
        for micro in self._walks.run(batch, gradients, is_finite=is_finite):
            self._walks.backward(loss_of(micro))
        return self._walked(batch, began, data_s, names_unused=True)

    def _plain_walk(self, batch: StepBatch) -> Iterator[Any]:
        began, data_s = time.perf_counter(), batch.data_s
        yield from self._walks.run(batch, list(self._gradients.values()))
        # With several models each walk of a plain loop is about one of them, so the others' parameters are idle on
        # purpose.
        self._walked(batch, began, data_s, names_unused=len(self._gradients) == 1)

    def _walked(self, batch: StepBatch, began: float, data_s: float, *, names_unused: bool) -> Outcome:
        outcome = cast("Outcome", self._walks.outcome)
        current = self._current
        if current is not None and current.batch is batch:
            current.compute_s += time.perf_counter() - began - outcome.communication_s - (batch.data_s - data_s)
            current.communication_s += outcome.communication_s
            current.outcome = outcome if current.outcome is None or not outcome.finite else current.outcome
            current.agreed_at = time.perf_counter()
        if not outcome.finite:
            self._warn(
                f"step {batch.step} was skipped on all workers: its gradients are not finite (loss "
                f"{float(outcome.loss):.4g})",
                once=False,
            )
        if outcome.unused and names_unused:
            shown = ", ".join(sorted(outcome.unused)[:8]) + (
                f" and {len(outcome.unused) - 8} more" if len(outcome.unused) > 8 else ""
            )
            self._warn(
                f"these parameters got no gradient from any worker and stay as they are: {shown}",
                once=True,
                key="unused",
            )
        return outcome

    def commit(self, batch: StepBatch) -> None:
        """End the transaction of a batch: steppers call it, and prepared optimizers in the plain loop."""
        current = self._current
        if current is None or current.batch is not batch:
            raise RuntimeError("this batch is over: step(batch) belongs inside the loop over worker.batches()")
        now = time.perf_counter()
        current.optimizer_s += now - current.agreed_at
        current.agreed_at = now
        if not current.is_committed and current.outcome is not None:
            self.step += 1
            current.is_committed = True
            self._advance(current, skipped=not current.outcome.finite)

    def _advance(self, current: _Step, *, skipped: bool) -> None:
        batch = current.batch
        current.stream.cursor.epoch, current.stream.cursor.position = batch.epoch, batch.stop
        self._files.ledger.committed(batch, step=batch.step, skipped=skipped)

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._walks.under_way:
            raise RuntimeError(
                "optim.step() was called inside the walk over a batch, before the gradients were averaged. "
                "Put it after the loop: for x, y in batch: worker.backward(...)   then   optim.step()"
            )
        capture, current = self._files.capture, self._current
        if capture is not None and current is not None:
            names = self._prepared.registry.parameter_names()
            capture.gradients(
                current.batch.step, [(names[id(p)], p) for g in optimizer.param_groups for p in g["params"]]
            )

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._current is not None and self._current.outcome is not None:
            self.commit(self._current.batch)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        measures: Mapping[str, Measure] | Measure,
        *,
        micro: int | None = None,
        collate: Collate = default_collate,
        forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
    ) -> dict[str, float]:
        """Return exact means over a dataset with len() and [], equal on all workers; nothing is padded or counted
        twice.

        `measures` maps names to fn(output, target), which returns the mean over a micro-batch or (sum, count); one
        function alone is called "loss". `micro` samples are run at once (default: the plan's micro-batch).
        """
        began = time.perf_counter()
        named = measures if isinstance(measures, Mapping) else {"loss": measures}
        results = evaluate(
            model,
            dataset,
            named,
            micro=micro or self.plan.batch.resolved_micro,
            group=self._group,
            device=self.device,
            precision=self.plan.compute.precision,
            seeds=(self.plan.batch.seed, 4, self.step),
            collate=collate,
            forward=forward,
        )
        took_s = time.perf_counter() - began
        self._files.emit(Evaluated(step=self.step, num_samples=len(dataset), metrics=results, duration_s=took_s))
        return results

    def report(self, **metrics: float | Tensor) -> None:
        """Note values for the console and all other sinks, which average a step's values over the workers that report
        them. Outside of the loop over batches the values are told at once."""
        if self._current is not None:
            self._current.metrics.update(metrics)
        else:
            values = {name: float(value) for name, value in metrics.items()}
            self._files.emit(Reported(step=self.step, metrics=values))

    def save(self) -> None:
        """Save a checkpoint of the state after the last committed step; writing goes on in the background."""
        if self._walks.under_way:
            raise RuntimeError("worker.save() was called inside a step; call it between steps")
        cursors = {name: stream.cursor for name, stream in self._streams.items()}
        self._saved_at_step = self.step
        self._prepared.save(step=self.step, cursors=cursors)

    def restore(self, path: str | None = None) -> int:
        """Continue from a checkpoint: `path`, or the newest complete one of the run directory; returns its step (0:
        there is none).

        Objects that are prepared already are filled at once, others when they are prepared. A run directory with
        checkpoints is continued without this call.
        """
        if self._streams:
            raise RuntimeError("worker.restore() must come before worker.batches()")
        self._prepared.open(path)
        self._prepared.refill()
        self.step = self._saved_at_step = self._prepared.step
        return self.step

    def _resume(self) -> None:
        if self._files.may_resume:
            self._prepared.open(None)
            self.step = self._saved_at_step = self._prepared.step
        self._files.begin(from_step=self.step)
        if self.step:
            self._files.emit(Note(text=f"resumed from step {self.step} ({self._prepared.source})"))

    @property
    def is_first(self) -> bool:
        """Whether this is worker 0."""
        return self.rank == 0

    def average(self, value: Tensor | float) -> Tensor:
        """Return the mean of a tensor or number over all workers."""
        tensor = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, device=self.device)
        self._group.all_reduce(tensor, what="worker.average").wait()
        return tensor / self.workers

    def gather(self, value: T) -> list[T]:
        """Return every worker's value, in the order of their ranks, on every worker. Values are pickled."""
        return self._group.gather_objects(value)

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """Return the value of worker `source` on every worker. Values are pickled."""
        return self._group.broadcast_object(value, source=source)

    def wait(self) -> None:
        """Return when all workers have come here."""
        self._group.barrier()

    def end(self) -> None:
        """Close the run's books after the user's function has returned: last checkpoint, events, files."""
        self._leave()
        if self._streams and self._files.saves_at_end and self._saved_at_step != self.step:
            self.save()
        self._group.barrier()  # who ends last has seen everybody's last words
        self._prepared.close()
        if self._files.capture is not None:
            self._files.capture.weights(self._prepared.registry.models)
        self._files.finish(self.step)

    def abandon(self) -> None:
        """After an error: forget the step under way, and give a checkpoint under way a moment to be committed."""
        self._leave()
        self._prepared.abandon()

    def _emit_step(self, current: _Step) -> None:
        now = time.perf_counter()
        num_bytes = sum(gradients.num_bytes_sent for gradients in self._gradients.values())
        outcome, batch = current.outcome, current.batch
        loss = float(outcome.loss) if outcome is not None else None
        if self._files.capture is not None and loss is not None:
            self._files.capture.loss(batch.step, loss)
        self._files.emit(
            StepDone(
                step=batch.step,
                epoch=batch.epoch,
                num_samples=batch.num_samples,
                loss=loss,
                metrics={key: float(value) for key, value in current.metrics.items()},
                seconds={
                    "data": batch.data_s,
                    "compute": current.compute_s,
                    "communication": current.communication_s,
                    "optimizer": current.optimizer_s,
                    "total": now - self._turned_at,
                },
                skipped=outcome is not None and not outcome.finite,
                num_bytes_sent=num_bytes - self._num_bytes_before,
            )
        )
        self._turned_at, self._num_bytes_before = now, num_bytes

    def _prepare_model(self, model: nn.Module, name: str | None) -> None:
        place(model, self.plan, device=self.device)
        full_name = self._prepared.model(model, name)
        self._gradients[model] = GradientSum(
            [(f"{full_name}.{key}", parameter) for key, parameter in model.named_parameters()],
            group=self._group,
            sync=self.plan.sync,
            wire=self.plan.wire,
        )

    def _warn(self, text: str, *, once: bool, key: str = "") -> None:
        if not once or key not in self._told:
            self._told.add(key)
            self._files.emit(Warned(text=text))


class _Step:
    """What is known of the step under way."""

    def __init__(self, batch: StepBatch, stream: Stream) -> None:
        self.batch, self.stream = batch, stream
        self.outcome: Outcome | None = None
        self.metrics: dict[str, Any] = {}
        self.is_committed = False
        self.compute_s = self.communication_s = self.optimizer_s = 0.0
        self.agreed_at = time.perf_counter()


def _bound(forward: Callable[[Any, Any], Any], model: Any) -> Callable[[Any], Any]:
    return lambda micro: forward(model, micro)


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}_{number}") in taken:
        number += 1
    return candidate
