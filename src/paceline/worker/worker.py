"""The worker: what a training function is given, and everything that it calls.

Each process has one. All workers call every public method, in the same order and between steps, unless the method says
otherwise. `build.py` puts a worker together, `lifecycle.py` begins and ends it, `loop/` takes its steps, and `state/`
keeps what was prepared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from paceline.errors import PlanError
from paceline.events import Evaluated, Note
from paceline.parallel.check.model_hints import ModelHints
from paceline.worker.data.batch_stream import StreamSource
from paceline.worker.data.data_loading import Collate
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.loop.stepper import Stepper, make_stepper
from paceline.worker.parts import WorkerParts
from paceline.worker.state.embedding_tables import require_row_updates, server_table_names
from paceline.worker.step.evaluation import Measure, evaluate
from paceline.worker.step.gradient_pass import LossLike

if TYPE_CHECKING:
    pass

__all__ = ["Worker"]

T = TypeVar("T")


class Worker:
    """One process of a run, normally with one device."""

    def __init__(self, parts: WorkerParts) -> None:
        """`paceline.worker.build` makes workers; a training function is given one."""
        self._parts = parts
        self.rank, self.plan, self.device = parts.rank, parts.plan, parts.device
        self._place, self._own, self._files, self._timeout_s = parts.place, parts.own, parts.files, parts.timeout_s
        self._group, self._agreement, self._recorder = parts.place.group, parts.place.agreement, parts.place.recorder
        self._shards, self._talk = parts.shards, parts.collectives
        self._servers, self._tables, self._models = parts.servers, parts.tables, parts.models
        self._memories, self._prepared = parts.codec_state, parts.prepared
        self._numerical_guard, self._memory_checkpointer = parts.numerical_guard, parts.memory_checkpointer
        self._loop = parts.loop

    def prepare(
        self,
        thing: T,
        *,
        name: str | None = None,
        sample: Any = None,
        cut: Mapping[str, str] | None = None,
        units: Sequence[str] = (),
        stages: Sequence[str] = (),
        tokenwise: Sequence[str] = (),
        experts: Sequence[str] = (),
    ) -> T:
        """Make a model, optimizer, scheduler or other stateful object part of the run; returns the same object.

        A model is converted, moved and wrapped in place as the plan says, and gets worker 0's weights. Prepare models
        before their optimizers, and optimizers before their schedulers. What has `state_dict` and `load_state_dict`
        goes into checkpoints under `name` (by default "model", "optimizer", "scheduler", "object", then "model_2", ...)
        and comes back from them. ValueError where tensors of two names could not be told apart in a checkpoint: a model
        "gan" beside an optimizer "gan.optim".

        Layouts that cut layers run a model once on a small input. Where it cannot be guessed, `sample` gives it: a
        batch of two as (x,) or {"input_ids": x}. `cut` names the roles of layers, in place of those that are found:
        {"layers.*.attn.q": "column", "layers.*.attn.out": "row"}.

        `units` names the modules that are gathered, recomputed or put on a stage as a whole, in place of the repeated
        blocks that are found: units=["layers.*", "head"].

        Layouts with stages need that input, too, and may be told which modules the stages after the first begin with:
        stages=["layers.4", "layers.8"]; otherwise they are cut to cost about the same. Layouts that share sequences
        (context) may be told which modules treat each token by itself though torch does not show it: routed experts,
        say, tokenwise=["layers.*.moe"]. Layouts that spread experts find those that have `num_experts`, or are lists;
        others are named: experts=["layers.*.moe.experts"].
        """
        if isinstance(thing, nn.Module):
            hints = ModelHints(
                sample=sample,
                cut=cut,
                units=units,
                stages=stages,
                tokenwise=tokenwise,
                experts=experts,
            )
            self._prepare_model(thing, name, hints)
        elif isinstance(thing, Optimizer):
            require_row_updates(thing, self._tables, self._prepared.registry.parameter_names())
            self._prepared.optimizer(thing, name)
            self._loop.follow(thing)
        elif self.plan.is_asynchronous and isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            raise PlanError(
                f"worker.prepare() got a {type(thing).__name__} under ParameterServer(staleness=...) or (drop=...): "
                "each replica would count only its own batches. Set the rate from worker.step, which counts all: for "
                "group in optim.param_groups: group['lr'] = rate(worker.step), before step(batch); or use "
                "staleness=0 and drop=0."
            )
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
        return make_stepper(
            model,
            optimizer,
            loss,
            forward=forward,
            clip_norm=clip_norm,
            loop=self._loop,
            prepared_models=self._models,
            prepared_optimizers=self._prepared.registry.optimizers.values(),
            device=self.device,
        )

    def batches(
        self,
        dataset: Any,
        *,
        epochs: int = 1,
        collate: Collate | None = None,
        loaders: int | None = None,
        prefetch: int = 2,
        name: str | None = None,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
    ) -> Iterator[StepBatch]:
        """Yield one item a step: this worker's micro-batches of the global batch, from where the run stands.

        `loaders` processes read ahead, `prefetch` micro-batches each (0: this process reads). `name` tells streams
        apart in checkpoints and the ledger; by default "train", then "train_2", ... Each name has its own order of
        samples, so a loop `for epoch in range(n): for batch in worker.batches(data)` gets another order in each epoch.
        Such a loop cannot be resumed rightly in a later epoch: a stream that was finished gives nothing, but the code
        behind its loop runs again. Use `epochs=n`, and `batch.ends_epoch` for what is done once per epoch.

        `collate` makes a micro-batch of a list of samples, as torch's `default_collate` does. torch's own names work,
        too: `collate_fn` for `collate`, and `num_workers` for `loaders`.
        """
        collate = only_one("collate", collate, "collate_fn", collate_fn) or default_collate
        loaders = only_one("loaders", loaders, "num_workers", num_workers) or 0
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1")
        if loaders < 0 or prefetch < 1:
            raise ValueError(f"loaders={loaders}, prefetch={prefetch}: loaders must be 0 or more, prefetch 1 or more")
        self._talk.begin_steps(keeps=self._memory_checkpointer.is_on)
        streams = self._loop.streams
        name = name or _unused("train", streams)
        if name in streams:
            raise ValueError(f"a stream named {name!r} exists already; give each call of worker.batches() its own name")
        source = StreamSource(
            dataset=dataset,
            epochs=epochs,
            collate=collate,
            loaders=loaders,
            prefetch=prefetch,
            pin=self.device.type == "cuda",
            name=name,
        )
        return self._loop.open(source, timeout_s=self._timeout_s)

    def backward(self, loss: LossLike) -> None:
        """Add a micro-batch's gradient, in the plain loop; `loss` is the mean over the micro-batch, or (sum, count).

        Gradients are averaged over all workers when the walk over the batch ends: then clip if you like,
        `optim.step()`, `optim.zero_grad()`.
        """
        self._loop.executor.backward(loss)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Bound the global norm of the averaged gradients, in the plain loop; returns the norm before, 0-d.

        As torch.nn.utils.clip_grad_norm_, for every layout: where layers are cut, a worker's own parts of the gradients
        do not have the model's norm. Call it between the walk over a batch and `optim.step()`.
        """
        if max_norm <= 0:
            raise ValueError(f"clip_gradients({max_norm}): the norm must be more than 0")
        return self._loop.clip(max_norm)

    def evaluate(
        self,
        model: nn.Module,
        dataset: Any,
        measures: Mapping[str, Measure] | Measure,
        *,
        micro: int | None = None,
        collate: Collate | None = None,
        forward: Callable[[nn.Module, Any], tuple[Any, Any]] | None = None,
        collate_fn: Collate | None = None,
    ) -> dict[str, float]:
        """Return exact means over a dataset with len() and [], equal on all workers; nothing is padded or counted
        twice.

        `measures` maps names to fn(output, target), which returns the mean over a micro-batch or (sum, count); one
        function alone is called "loss". `micro` samples are run at once (default: the plan's micro-batch).
        """
        self._talk.require_between_steps("worker.evaluate()")
        self._recorder.begin("evaluation", self.step)
        began = time.perf_counter()
        named = measures if isinstance(measures, Mapping) else {"loss": measures}
        who = self._own if self._loop.mode.is_apart else self._place  # each by itself, on the weights that it has

        def measure() -> dict[str, float]:
            with self._loop.mode.averaged():
                return evaluate(
                    model,
                    dataset,
                    named,
                    micro=micro or self.plan.batch.resolved_micro,
                    group=who.group,
                    device=self.device,
                    precision=self.plan.compute.precision,
                    seeds=(self.plan.batch.seed, 4, self.step),
                    collate=only_one("collate", collate, "collate_fn", collate_fn) or default_collate,
                    forward=forward,
                    axes=who.axes,
                    shards=self._shards,
                    staged=self._models.staged(model),
                )

        results = measure() if self._loop.mode.is_apart else self._talk.together(measure)
        took_s = time.perf_counter() - began
        self._files.emit(Evaluated(step=self.step, num_samples=len(dataset), metrics=results, duration_s=took_s))
        return results

    def report(self, **metrics: float | Tensor) -> None:
        """Note values for the console and all other sinks, which average a step's values over the workers that report
        them. Outside of the loop over batches the values are told at once."""
        self._loop.step_log.report(metrics)

    def save(self) -> None:
        """Save a checkpoint of the state after the last committed step; writing goes on in the background.

        Raises RuntimeError, on the first worker, where that has left a loop over dealt batches before its end.
        """
        self._talk.require_together("worker.save()")
        if self.is_first and self._loop.mode.has_left:  # it writes; that another one has left does not change its state
            self._loop.mode.require_common_step("worker.save()")
        self._loop.save()

    def restore(self, path: str | None = None) -> int:
        """Continue from a checkpoint: `path`, or the newest complete one of the run directory; returns its step (0:
        there is none).

        Objects that are prepared already are filled at once, others when they are prepared. A run directory with
        checkpoints is continued without this call. Files are compared with their checksums first: where
        those of `path` are damaged, all workers raise CheckpointError.
        """
        if self._loop.streams:
            raise RuntimeError("worker.restore() must come before worker.batches()")
        if self._prepared.is_recalled:
            self._say(f"worker.restore() changes nothing: the run goes on from memory, after step {self.step}")
            return self.step
        self._prepared.open(path)
        self._prepared.refill()
        self._loop.begin_at(self._prepared.step)
        self._files.begin(self._prepared.origin())
        if self.step:
            self._files.emit(Note(text=f"restored step {self.step} ({self._prepared.source})"))
        return self.step

    def __repr__(self) -> str:
        return f"<worker {self.rank} of {self.workers} on {self.device}, step {self.step}>"

    @property
    def step(self) -> int:
        """How many steps are committed, over all attempts."""
        return self._loop.step

    @property
    def is_first(self) -> bool:
        """Whether this is the first worker: worker 0, or, after that was lost, the next one."""
        return self._place.is_first(self.rank)

    @property
    def workers(self) -> int:
        """How many workers take part at present."""
        return len(self._agreement.present) or self._group.size

    @property
    def replica(self) -> int:
        """The number of the replica that this worker belongs to."""
        return self.rank // self.plan.layout.workers_each

    def average(self, value: Tensor | float) -> Tensor:
        """Return the mean of a tensor or number over all workers."""
        return self._talk.average(value)

    def gather(self, value: T) -> list[T]:
        """Return every worker's value, in the order of their ranks, on every worker. Values are pickled."""
        return self._talk.gather(value)

    def broadcast(self, value: T, *, source: int | None = None) -> T:
        """Return the value of the worker whose rank is `source` on every worker; None: of the first one (`is_first`).

        Values are pickled. Raises ValueError, on all workers, where there is no such worker (any more).
        """
        return self._talk.broadcast(value, source=source)

    def wait(self) -> None:
        """Return when all workers have come here."""
        self._talk.wait()

    def _prepare_model(self, model: nn.Module, name: str | None, hints: ModelHints) -> None:
        self._models.place(model, device=self.device, is_fresh=self._prepared.is_fresh(model, name), hints=hints)
        cuts, homes, tables = (
            self._models.slices(model),
            self._models.homes(model),
            server_table_names(model, self._tables),
        )
        self._models.add(model, self._prepared.model(model, name, cuts=cuts, homes=homes, tables=tables))

    def _say(self, text: str) -> None:
        if self.is_first:
            self._files.emit(Note(text=text))


def only_one(name: str, value: T | None, alias: str, other: T | None) -> T | None:
    """Return what was given under either of two names; ValueError where both were."""
    if value is not None and other is not None:
        raise ValueError(f"{name}={value!r} and {alias}={other!r} are two names of one option; give {name}")
    return other if value is None else value


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}_{number}") in taken:
        number += 1
    return candidate
