"""The worker: what a training function is given, and all it needs.

One object per process. It owns the transaction: `walk` is its inside, `commit` its end; `books` counts, and between
steps a checkpoint is saved where one is due. Every public method is called by all workers, in the same order, between
steps, unless it says otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from paceline.comm.group import Disrupted
from paceline.events import Evaluated, Note, StreamOpened
from paceline.parallel.apply import place, send_from_first
from paceline.parallel.shard import ShardedModel
from paceline.plan import Plan
from paceline.sync.allreduce import GradientSum
from paceline.sync.buckets import Named
from paceline.worker.balance import Balance
from paceline.worker.batch import StepBatch
from paceline.worker.books import Books
from paceline.worker.comparing import Comparison
from paceline.worker.evaluation import Measure, evaluate
from paceline.worker.guarding import Guarding
from paceline.worker.place import Place
from paceline.worker.preparing import Preparation
from paceline.worker.reading import Collate
from paceline.worker.record import RunFiles
from paceline.worker.stepper import Stepper, pair_loss
from paceline.worker.stream import Cursor, Source, Stream
from paceline.worker.walk import Again, LossLike, Outcome, Walks

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """One process of a run, normally with one device."""

    def __init__(
        self,
        *,
        rank: int,
        plan: Plan,
        place: Place,
        device: torch.device,
        files: RunFiles,
        host: str,
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.device = device
        self.host = host
        group, agreement = self._group, self._agreement = place.group, place.agreement
        self._axes = place.axes
        self._prelude = place.prelude
        self._files, self._timeout_s, self._ring = files, timeout_s, place.ring
        self._walks = Walks(plan, group=group, agreement=agreement, device=device, axes=place.axes)
        self._prepared = Preparation(
            plan,
            group=group,
            agreement=agreement,
            device=device,
            buffers=self._walks.buffers,
            losses=self._walks.losses,
            files=files,
            axes=place.axes,
            store=place.shared,
            timeout_s=timeout_s,
        )
        registry = self._prepared.registry
        self._guarding = Guarding(
            plan.guard,
            losses=self._walks.losses,
            registry=registry,
            files=files,
            comparison=Comparison(
                worker_rank=rank,
                host=host,
                group=place.axes.across,
                together=agreement.run,
                registry=registry,
                files=files,
            ),
        )
        self._parameters: dict[nn.Module, list[Named]] = {}  # of each prepared model, as they were then
        self._sums: dict[tuple[int, ...], GradientSum] = {}  # by the models that a walk is about
        self._num_checked: dict[Optimizer, int] = {}  # parameters of each prepared optimizer
        self._books = Books(
            files,
            lambda: sum(
                (gradients.num_bytes_sent for gradients in self._sums.values()),
                self._walks.shards.traffic.num_bytes_sent,
            ),
            is_elastic=plan.layout.is_elastic,
            add_work=place.ring.add_work,
        )
        self._streams: dict[str, Stream] = {}
        self._balance = Balance(is_on=files.balances and not place.axes.is_split)
        if files.balances and place.axes.is_split and rank == 0:
            files.emit(Note(text="balance is not used: the workers of a sharded replica run in step with each other"))
        self._saved_at_step = self._balanced_at = -1
        self._is_stopped = False  # by max_steps
        place.attach(self)
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
            self._check_optimizer(thing)
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
            if one not in self._parameters:
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
        gradients = self._sum_over(models)
        for one in optimizers:
            strangers = sum(not gradients.has(p) for group in one.param_groups for p in group["params"])
            if strangers:
                raise ValueError(
                    f"{type(one).__name__} holds {strangers} parameters that are not of this stepper's models: "
                    "their gradients "
                    "would not be averaged. Give the stepper all models: worker.stepper([a, b], optim, forward=...)"
                )
        return Stepper(
            self,
            optimizers=optimizers,
            gradients=gradients,
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
        apart in checkpoints and the ledger; by default "train", then "train_2", ... Each name has its own order of
        samples, so a loop `for epoch in range(n): for batch in worker.batches(data)` gets another order in each epoch.
        Such a loop cannot be resumed rightly in a later epoch: a stream that was finished gives nothing, but the code
        behind its loop runs again. Use `epochs=n`, and `batch.ends_epoch` for what is done once per epoch.
        """
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1")
        if loaders < 0 or prefetch < 1:
            raise ValueError(f"loaders={loaders}, prefetch={prefetch}: loaders must be 0 or more, prefetch 1 or more")
        self._begin()
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
            source,
            self.plan.batch,
            cursor=cursor,
            group=self._group,
            walk=self._plain_walk,
            together=self._agreement.run,
            balance=self._balance,
            timeout_s=self._timeout_s,
            each=self._axes.each,
        )
        self._streams[name] = stream
        self._prepared.begin_training()
        self._say_what_goes_on(stream)
        self._files.ledger.opened(name, **stream.about())
        self._files.emit(
            StreamOpened(
                name=name, num_samples=stream.num_samples, epochs=epochs, last_step=stream.last_step(self.step)
            )
        )
        return self._steps(stream)

    def _say_what_goes_on(self, stream: Stream) -> None:
        """Tell what of a stream is not as it was when its checkpoint was saved."""
        if not self.is_first:
            return
        if stream.was_finished:
            self._books.warn(
                f"stream {stream.source.name!r} was finished before the checkpoint: its loop is empty now, and code "
                "after it runs again. Use epochs=n and batch.ends_epoch instead",
                once="finished",
            )
            return
        for text in stream.notes:
            self._files.emit(Note(text=text))

    def _steps(self, stream: Stream) -> Iterator[StepBatch]:
        name = stream.source.name
        steps = stream.steps(lambda: self.step + 1)
        while True:
            self._ring.begin("between two steps", self.step)
            self._agreement.between_steps()
            self._rebalance()
            self._guarding.keep(self.step, self._cursors)
            self._ring.begin("waiting for data", self.step + 1)
            batch = next(steps, None)
            if batch is None:
                return
            if self._files.is_last_step(self.step):
                self._stop()
                return
            self._books.open(batch, stream.cursor)
            try:
                yield batch
            except GeneratorExit:
                # The user left the loop, by `break` or by an error on its way: what was not committed did not happen.
                self._books.leave(name)
                self._guarding.settle(self.step, self._cursors)
                raise
            self._books.close(name)
            self._guarding.settle(self.step, self._cursors)
            self._ring.begin("between two steps", self.step)
            self._guarding.compare(self.step, is_save_due=self._files.is_save_due(self.step))
            if self._files.is_save_due(self.step) and self._saved_at_step != self.step:
                self.save()
            elif self._files.saves_regularly:
                self._prepared.warm()

    def _rebalance(self) -> None:
        """Where a look is due, compare what a micro-batch takes each worker, and deal them anew if that gains."""
        if not self._balance.is_due(self.step) or self.step == self._balanced_at:
            return
        self._balanced_at = self.step
        measured, num_micro = self._balance.measured(), self.plan.batch.num_micro
        seconds = self._agreement.run(lambda: self._group.gather_objects(measured))
        if len(seconds) != self._group.size or not self._balance.agree(seconds, num_micro):
            return
        for stream in self._streams.values():
            stream.members_changed()
        if self.is_first:
            counts = [len(share) for share in self._balance.shares(num_micro, len(seconds))]
            took = ", ".join(f"{one * 1e3:.3g}" for one in seconds)
            text = f"after step {self.step} the workers run {counts} micro-batches of a step: one took them {took} ms"
            self._files.emit(Note(text=text))

    def backward(self, loss: LossLike) -> None:
        """Add a micro-batch's gradient, in the plain loop; `loss` is the mean over the micro-batch, or (sum, count).

        Gradients are averaged over all workers when the walk over the batch ends: then clip if you like,
        `optim.step()`, `optim.zero_grad()`.
        """
        self._walks.backward(loss)

    def walk(
        self,
        batch: StepBatch,
        gradients: GradientSum,
        loss_of: Callable[[Any], Any],
        *,
        is_finite: Callable[[], bool] | None,
    ) -> Outcome:
        """Walk over a batch for a stepper; returns what all workers agreed on."""
        for micro in self._timed_walk(batch, gradients, is_finite, names_unused=True):
            self._walks.backward(loss_of(micro))
        return cast("Outcome", self._walks.outcome)

    def _plain_walk(self, batch: StepBatch) -> Iterator[Any]:
        # With several models each walk of a plain loop is about one of them: the others are idle on purpose.
        models = list(self._parameters)
        if not models:
            raise RuntimeError("no model is prepared, so nothing would be averaged: model = worker.prepare(model)")
        return self._timed_walk(batch, self._sum_over(models), None, names_unused=len(models) == 1)

    def _timed_walk(
        self, batch: StepBatch, gradients: GradientSum, is_finite: Callable[[], bool] | None, *, names_unused: bool
    ) -> Iterator[Any]:
        step = self._books.begin_walk(batch)
        self._ring.begin("forward and backward", batch.step)
        began, data_s = time.perf_counter(), batch.data_s
        while True:
            try:
                yield from self._walks.run(batch, gradients, is_finite=is_finite)
                break
            except Disrupted as disruption:
                if self._agreement.elastic is None:
                    raise
                if not isinstance(disruption, Again):
                    self._agreement.regroup(holds_result=False)
            # The same step comes again, with new shares: its samples, and so its gradient, are the same.
            if batch.num_walks == 0:
                self._agreement.hold()
            self._streams[batch.stream].redeal(batch)
            began, data_s = time.perf_counter(), batch.data_s
        outcome = cast("Outcome", self._walks.outcome)
        step.compute_s += time.perf_counter() - began - outcome.communication_s - (batch.data_s - data_s)
        self._ring.begin("optimizer and the loop's code", batch.step)
        self._balance.note(time.perf_counter() - began - outcome.communication_s, len(batch))
        if outcome.spike is not None:
            self._guarding.spiked(batch.step, outcome.spike)
        self._books.end_walk(step, outcome, names_unused=names_unused)

    def commit(self, batch: StepBatch) -> None:
        """End the transaction of a batch: steppers call it, and prepared optimizers in the plain loop."""
        self._books.commit(batch)
        self._agreement.committed()

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._walks.under_way:
            raise RuntimeError(
                "optim.step() was called inside the walk over a batch, before the gradients were averaged. "
                "Put it after the loop: for x, y in batch: worker.backward(...)   then   optim.step()"
            )
        self._check_optimizer(optimizer)
        step = self._books.latest
        if step is None or step.batch.num_walks == 0:
            return
        if self._walks.outcome is None:
            raise RuntimeError(
                "the walk over this batch was left early (break, or an error that was caught), so its gradients "
                "were not "
                "averaged and are dropped. Walk over the batch to its end before optim.step()"
            )
        if self._walks.outcome.is_empty:
            raise RuntimeError(
                "the last walk over this batch called no worker.backward(): there is nothing for optim.step() to apply"
            )
        if self._files.capture is not None:
            names = self._prepared.registry.parameter_names()
            # Of split parameters all workers have to give their rows.
            parameters = [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"]]
            self._files.capture.gradients(step.batch.step, parameters)

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._books.latest is not None:
            self.commit(self._books.latest.batch)

    def _check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse parameters that nobody averages: those of models, or of parts of them, that were not there at
        `prepare(model)`."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._num_checked.get(optimizer) == len(held):
            return
        known = {id(parameter) for parameters in self._parameters.values() for _, parameter in parameters}
        strangers = sum(id(parameter) not in known for parameter in held)
        if strangers:
            raise ValueError(
                f"{type(optimizer).__name__} holds {strangers} parameters that were in no model when it was "
                "prepared: they "
                "would not be averaged. Replace or add layers before worker.prepare(model), then make the optimizer"
            )
        self._num_checked[optimizer] = len(held)

    def _sum_over(self, models: Sequence[nn.Module]) -> GradientSum:
        key = tuple(id(model) for model in models)
        if key not in self._sums:
            named = [pair for model in models for pair in self._parameters[model]]
            self._sums[key] = GradientSum(
                named,
                group=self._axes.across,
                sync=self.plan.sync,
                wire=self.plan.wire,
                everybody=self._group,
                inside=self._axes.inside,
                is_used=self._walks.shards.is_used,
            )
        return self._sums[key]

    def _require_between_steps(self, what: str) -> None:
        """Inside a walk other workers may have more or fewer micro-batches: a collective would meet another one."""
        if self._walks.under_way:
            raise RuntimeError(f"{what} was called inside a step (a walk over a batch); call it between steps")

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
        self._require_between_steps("worker.evaluate()")
        self._ring.begin("evaluation", self.step)
        began = time.perf_counter()
        named = measures if isinstance(measures, Mapping) else {"loss": measures}
        results = self._together(
            lambda: evaluate(
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
                each=self._axes.each,
                shards=self._walks.shards,
            )
        )
        took_s = time.perf_counter() - began
        self._files.emit(Evaluated(step=self.step, num_samples=len(dataset), metrics=results, duration_s=took_s))
        return results

    def report(self, **metrics: float | Tensor) -> None:
        """Note values for the console and all other sinks, which average a step's values over the workers that report
        them. Outside of the loop over batches the values are told at once."""
        self._books.report(metrics)

    def _begin(self) -> None:
        """The first loop over batches begins. A newcomer is taken in here, and has a member's state then."""
        if self._prelude.is_over:
            return
        self._agreement.begin_steps()
        self._prelude.end(self.is_first)

    def _together(self, operation: Callable[[], T]) -> T:
        """Do an operation of all workers. Newcomers take the results of those before the first loop from the others."""
        if self._agreement.is_newcomer:
            return self._prelude.next()
        value = self._agreement.run(operation)
        self._prelude.note(value)
        return value

    def snapshot(self) -> dict[str, Any]:
        """For a newcomer: this worker's whole state, between two steps."""
        return {
            "books": self._books.plain(),
            "guarding": self._guarding.plain(),
            "balanced_at": self._balanced_at,
            **self._prepared.snapshot(step=self.step, cursors=self._cursors),
        }

    def fill(self, state: Mapping[str, Any]) -> None:
        """Take over a member's state."""
        self._prepared.fill(state)
        self._books.fill(state["books"])
        self._guarding.fill(state["guarding"])
        self._saved_at_step, self._balanced_at = self._books.step, state["balanced_at"]

    def regrouped(self) -> None:
        """The members are others: forget what was made for the old ones."""
        for gradients in self._sums.values():
            gradients.members_changed()
        for stream in self._streams.values():
            stream.members_changed()
        self._balance.forget()
        self._prepared.has_taken_over = True
        if self._prelude.is_over:
            self._prelude.end(self.is_first)

    def settle(self) -> None:
        """Save, and wait until the checkpoint is complete; on all workers."""

        def settle() -> None:
            if self._saved_at_step != self.step or not self.is_first:
                self.save()
            self._prepared.wait()
            self._group.barrier()

        self._books.leave()
        self._agreement.run(settle)

    def save(self) -> None:
        """Save a checkpoint of the state after the last committed step; writing goes on in the background."""
        self._require_between_steps("worker.save()")
        self._walks.shards.close()
        self._ring.begin("saving", self.step)
        self._guarding.put_back(self.step, self._cursors)
        self._saved_at_step = self.step
        self._prepared.save(step=self.step, cursors=self._cursors)

    def _stop(self) -> None:
        """A loop ends at max_steps: what a later start goes on from is the state of now. Code after the loop will run
        there too, in its time, so what it does today is not saved at the end."""
        if self._files.saves_at_end and not self._is_stopped and self.step > self._prepared.step:
            self.save()
        self._is_stopped = True

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
        self._books.step = self._saved_at_step = self._prepared.step
        self._guarding.begin(self.step)
        self._files.begin(self._prepared.origin())
        if self.step:
            self._files.emit(Note(text=f"restored step {self.step} ({self._prepared.source})"))
        return self.step

    def _resume(self) -> None:
        if self._files.may_resume:
            self._prepared.open(None)
            self._books.step = self._saved_at_step = self._prepared.step
            self._guarding.begin(self.step)
        self._files.begin(None if self._agreement.is_newcomer else self._prepared.origin())
        if self.step:
            self._files.emit(Note(text=f"resumed from step {self.step} ({self._prepared.source})"))

    @property
    def _cursors(self) -> dict[str, Cursor]:
        return {name: stream.cursor for name, stream in self._streams.items()}

    def __repr__(self) -> str:
        return f"<worker {self.rank} of {self.workers} on {self.device}, step {self.step}>"

    @property
    def step(self) -> int:
        """How many steps are committed, over all attempts."""
        return self._books.step

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker: worker 0, or, after that was lost, the next one."""
        return self._group.index == 0

    @property
    def workers(self) -> int:
        """How many workers take part at present."""
        return self._group.size

    @property
    def replica(self) -> int:
        """The number of the replica that this worker belongs to."""
        return self.rank // self.plan.layout.workers_each

    def average(self, value: Tensor | float) -> Tensor:
        """Return the mean of a tensor or number over all workers."""
        self._require_between_steps("worker.average()")
        if isinstance(value, Tensor):
            tensor = value.detach().clone()
        else:
            tensor = torch.tensor(value, dtype=torch.float64, device=self.device)

        def mean() -> Tensor:
            total = tensor.clone()
            self._group.all_reduce(total, what="worker.average").wait()
            return total / self.workers

        return self._together(mean)

    def gather(self, value: T) -> list[T]:
        """Return every worker's value, in the order of their ranks, on every worker. Values are pickled."""
        self._require_between_steps("worker.gather()")
        return self._together(lambda: self._group.gather_objects(value))

    def broadcast(self, value: T, *, source: int = 0) -> T:
        """Return the value of worker `source` on every worker. Values are pickled."""
        self._require_between_steps("worker.broadcast()")
        return self._together(lambda: self._group.broadcast_object(value, source=source))

    def wait(self) -> None:
        """Return when all workers have come here."""
        self._require_between_steps("worker.wait()")
        self._together(self._group.barrier)

    def end(self) -> None:
        """Close the run's books after the user's function has returned: last checkpoint, events, files."""
        self._ring.begin("ending", self.step)
        self._walks.shards.close()
        self._books.leave()
        if not self._agreement.is_newcomer:  # one that never came to a loop over batches has nothing to end

            def settle() -> None:
                if self._streams and self._files.saves_at_end and not self._is_stopped:
                    self.save()  # again, where this step was saved: code after the loop may have changed the state
                self._prepared.wait()
                self._group.barrier()  # who ends last has seen everybody's last words

            self._agreement.run(settle)
        self._prepared.close()
        if self._files.capture is not None:
            self._files.capture.weights(self._prepared.registry.models)
        self._files.finish(self.step, state_bytes=self._prepared.registry.num_bytes)

    def leave(self) -> None:
        """Close the books of a worker that leaves the run in good order, while it may go on without it."""
        self._books.leave()
        self._prepared.close()
        self._files.finish(self.step)

    def abandon(self) -> None:
        """After an error: forget the step under way, and give a checkpoint under way a moment to be committed."""
        self._books.leave()
        self._guarding.abandon()
        self._prepared.abandon()

    def _prepare_model(self, model: nn.Module, name: str | None) -> None:
        fresh = self._prepared.is_fresh(model, name)
        place(model, self.plan, device=self.device, split=lambda whole: self._split(whole, is_fresh=fresh))
        full_name = self._prepared.model(model, name)
        self._parameters[model] = [(f"{full_name}.{key}", parameter) for key, parameter in model.named_parameters()]

    def _split(self, model: nn.Module, *, is_fresh: bool) -> None:
        """Split a whole model's state over the workers of this replica, as the layout says."""
        axes = self._axes
        if axes.mesh is None:
            return
        if is_fresh:
            send_from_first([*model.parameters(), *model.buffers()], self._group)
        self._walks.shards.add(
            ShardedModel(
                model,
                mesh=axes.mesh,
                zero=self.plan.layout.zero,
                precision=self.plan.compute.precision,
                ring=self._ring,
                group=axes.shard_name,
                traffic=self._walks.shards.traffic,
            )
        )


def _bound(forward: Callable[[Any, Any], Any], model: Any) -> Callable[[Any], Any]:
    return lambda micro: forward(model, micro)


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}_{number}") in taken:
        number += 1
    return candidate
