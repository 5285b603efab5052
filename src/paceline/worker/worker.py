"""The worker: what a training function is given, and everything that it calls.

Each process has one. All workers call every public method, in the same order and between steps, unless the method says
otherwise. `build.py` puts a worker together, `lifecycle.py` begins and ends it, `loop/` takes its steps, and `state/`
keeps what was prepared.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.events import Evaluated
from paceline.parallel.check.model_hints import ModelHints
from paceline.parallel.file_weights import forget_origins, keep_in_memory
from paceline.units import name_text
from paceline.worker.data.batch_stream import StreamSource
from paceline.worker.data.data_loading import Collate
from paceline.worker.data.data_request import DataRequest, read_request
from paceline.worker.data.evaluation_data import read_evaluation
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.data.stream_position import stream_seed
from paceline.worker.loop.stepper import Stepper, make_stepper
from paceline.worker.loop.training_loop import TrainingLoop
from paceline.worker.parts import WorkerParts
from paceline.worker.state.embedding_tables import require_row_updates, server_table_names
from paceline.worker.state.foreign_models import settle_foreign_model
from paceline.worker.state.weight_average import ExponentialMovingAverage
from paceline.worker.stateful_member import StatefulMember
from paceline.worker.step.evaluation import Measure, evaluate
from paceline.worker.step.losses import LossLike
from paceline.worker.step.plain_state import Scan, changed_places
from paceline.worker.step.state_holders import holders_of_functions
from paceline.worker.step.weight_penalty import Penalty

__all__ = ["Worker"]

T = TypeVar("T")


class Worker(StatefulMember):
    """One process of a run, normally with one device. A training function is given it, and calls everything through it.

    All workers call every public method, in the same order and between steps, unless the method says otherwise. A call
    that waits for others raises SyncError when a peer is missing for `timeout_s`, or has entered another call. `rank`
    is this worker's number (int, from 0), `plan` the resolved Plan, `device` the torch.device.

    Example::

        def train(worker):
            model = worker.prepare(torch.nn.Linear(8, 1))
            optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
            step = worker.stepper(model, optim, torch.nn.functional.mse_loss)
            data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
            for batch in worker.batches(data, epochs=2):
                worker.report(loss=step(batch))
            return worker.step

        # paceline.run(train, workers=4, plan="batch(size=16)")
    """

    def __init__(self, parts: WorkerParts, loop: TrainingLoop) -> None:
        """`paceline.worker.build` makes workers; a training function is given one."""
        super().__init__(parts, loop)
        self._servers, self._tables = parts.servers, parts.tables
        self._prepared, self._memory_checkpointer = parts.prepared, parts.memory_checkpointer

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
        buffers: Mapping[str, str] | None = None,
    ) -> T:
        """Make a model, optimizer, scheduler or other stateful object part of the run; returns the same object.

        A model is converted, moved and wrapped in place as the plan says, and receives worker 0's weights. Prepare
        models before their optimizers, and optimizers before their schedulers. What has `state_dict` and
        `load_state_dict` goes into checkpoints under `name`, and comes back from them. Default names are "model",
        "optimizer", "scheduler", "object", then "model_2", ...

        The other arguments are for layouts that split a model, where what is found must be corrected:

        - `sample`: a batch of two, `(x,)` or `{"input_ids": x}`, on which the model runs once (tensor, pipeline
          parallel);
        - `cut`: roles of layers for tensor parallel: `{"layers.*.attn.q": "column", "layers.*.attn.out": "row"}`;
        - `units`: modules that are gathered, recomputed or put on a stage as a whole: `["layers.*", "head"]`;
        - `stages`: modules that the stages after the first begin with: `["layers.4", "layers.8"]`. By default stages
          cost about the same;
        - `tokenwise`: modules that treat each token by itself (context parallel): `["layers.*.moe"]`;
        - `experts`: lists of experts (expert parallel): `["layers.*.moe.experts"]`. Those with `num_experts` are found.

        `buffers` says how buffers that the forward writes are combined over micro-batches, where it is not found:
        `{"queue": "gather", "seen": "sum"}`. Keys are patterns of names, rules "mean", "sum", "first" or "gather".

        Raises PlanError if the plan cannot work with the model or optimizer, TypeError for other objects, and
        ValueError for names whose tensors a checkpoint could not tell apart. Raises CheckpointError if the checkpoint
        does not fit.

        Example::

            model = worker.prepare(torch.nn.Linear(8, 1))
            optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
            schedule = worker.prepare(torch.optim.lr_scheduler.StepLR(optim, step_size=10))
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
            self._prepare_model(thing, name, hints, buffers)
        elif isinstance(thing, Optimizer):
            require_row_updates(thing, self._tables, self._prepared.registry.parameter_names())
            self._prepared.optimizer(thing, name)
            self._loop.follow(thing)
        elif isinstance(thing, ExponentialMovingAverage):
            self._prepared.average(thing, name, close=self._parts.executor.shards.close)
        elif callable(getattr(thing, "state_dict", None)) and callable(getattr(thing, "load_state_dict", None)):
            self._loop.mode.check_prepared(thing)
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
        clip_value: float | None = None,
        penalty: Penalty | None = None,
    ) -> Stepper:
        """Return `step(batch)`, which runs forward and backward, agrees on gradients, clips, and steps the optimizers.

        `loss(output, target)` serves (input, target) batches; `forward(model, micro)` serves everything else. Either
        returns the mean over the micro-batch (0-d), or (sum, count), for example over tokens. `clip_norm` bounds the
        global norm of the averaged gradient; `clip_value` brings each of its numbers into [-clip_value, clip_value].
        `step(batch)` returns the loss of the whole global batch: a 0-d float64 tensor, equal on all workers. After it
        `step.grad_norm` is the global norm before clipping (0-d), as `torch.nn.utils.clip_grad_norm_` returns it.
        Gradients move between replicas as `Plan.sync` and `Plan.wire` say.

        `penalty(name, parameter)` adds a penalty on weights to the loss, L2 for example: it gets each trained parameter
        whole, by its name in the model, and returns one number, or None for no penalty on it. It is called once in a
        step, whatever the layout.

        Raises ValueError for models and optimizers that were not prepared, optimizers that need a closure (LBFGS), a
        bound of 0 and below, both bounds, and unless exactly one of `loss` and `forward` is given. `step(batch)` raises
        TypeError for other values, RuntimeError for a batch that is over, SyncError, and BadNumbersError.

        Example::

            step = worker.stepper(model, optim, torch.nn.functional.mse_loss, clip_norm=1.0)
            for batch in worker.batches(dataset):
                loss = step(batch)
        """
        return make_stepper(
            model,
            optimizer,
            loss,
            forward=forward,
            clip_norm=clip_norm,
            clip_value=clip_value,
            penalty=penalty,
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
        prefetch: int | None = None,
        name: str | None = None,
        weights: Sequence[float] | Tensor | None = None,
        lengths: Sequence[float] | Tensor | None = None,
        collate_fn: Collate | None = None,
        num_workers: int | None = None,
    ) -> Iterator[StepBatch]:
        """Yield one StepBatch a step: this worker's micro-batches of the global batch, from where the run stands.

        `collate` makes a micro-batch of a list of samples (default: torch's `default_collate`). `loaders` processes
        read ahead on each worker, `prefetch` micro-batches each (0: this process reads). torch's names work, too:
        `collate_fn` and `num_workers`. No data moves between workers.

        `name` tells streams apart in checkpoints and the ledger; by default "train", then "train_2", ... Each name has
        its own order of samples. So a loop `for epoch in range(n): for batch in worker.batches(data)` gets another
        order in each epoch. It cannot be resumed in a later epoch: a finished stream gives nothing, but the code behind
        its loop runs again. Use `epochs=n`, and `batch.ends_epoch` for what is done once per epoch.

        `weights`: a number of at least 0 for each sample. Each of an epoch's len(dataset) samples is then drawn with
        replacement, with a probability in proportion to its weight. Draws depend on seed and position alone, so they
        are the same on any number of workers, and after a resume.

        `lengths`: a number for each sample, such as its tokens. Samples of similar length then come in one step, and
        the most similar ones in one micro-batch, so that padding is little. Each still comes once an epoch.

        `dataset` may be a torch DataLoader. Its dataset, collate_fn, sampler, num_workers, prefetch_factor, pin_memory,
        drop_last and worker_init_fn are taken over. A note says what is not the same. Steps have the plan's samples;
        where the plan names no batch size, the loader's batch_size over all workers.

        Raises ValueError for numbers out of range, weights that do not fit, a name that is taken, and an empty dataset.
        Raises TypeError for what is no dataset, such as an iterator. Raises SyncError if weights or files' names
        differ between workers; so does the loop if an iterable dataset does.

        Example::

            for batch in worker.batches(dataset, epochs=2, loaders=0):
                step(batch)
                if batch.ends_epoch:
                    worker.save()
        """
        collate = _only_one("collate", collate, "collate_fn", collate_fn)
        loaders = _only_one("loaders", loaders, "num_workers", num_workers)
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}; it must be at least 1")
        if (loaders or 0) < 0 or (prefetch is not None and prefetch < 1):
            raise ValueError(f"loaders={loaders}, prefetch={prefetch}: loaders must be 0 or more, prefetch 1 or more")
        streams = self._loop.streams
        name = name or _unused("train", streams)
        request = read_request(
            dataset,
            self._parts.sizes.planned,
            seed=stream_seed(self.plan.batch, name),
            collate=collate,
            loaders=loaders,
            prefetch=prefetch,
            weights=weights,
            lengths=lengths,
        )
        if request.order_name:
            self._agree_on_order(request)
        self._collectives.begin_steps(keeps=self._memory_checkpointer.is_on)
        if name in streams:
            raise ValueError(f"a stream named {name!r} exists already; give each call of worker.batches() its own name")
        if request.batch_size is not None:
            if streams and request.batch_size != self._parts.sizes.batch.size:
                raise ValueError(
                    f"the DataLoader of stream {name!r} has batch_size={request.batch_size}, and the streams before it "
                    f"have steps of {self._parts.sizes.batch.size} samples: name the size of all in the plan, such as "
                    f"batch(size={request.batch_size})"
                )
            self._parts.sizes.adopt(dataclasses.replace(self.plan.batch, size=request.batch_size, micro=None))
        source = StreamSource(
            dataset=request.dataset,
            epochs=epochs,
            collate=request.collate,
            loaders=request.loaders,
            prefetch=request.prefetch,
            pin=request.pin and self.device.type == "cuda",
            name=name,
            draws=request.draws,
            shuffle=request.shuffle,
            drop_last=request.drop_last,
            begin_loader=request.begin_loader,
            takeover=request.takeover,
            lanes=request.lanes,
            mixing=request.mixing,
        )
        return self._loop.open(source, timeout_s=self._parts.timeout_s)

    def backward(self, loss: LossLike) -> None:
        """Add a micro-batch's gradient, in the plain loop.

        `loss` is the mean over the micro-batch (0-d), or (sum, count).

        Gradients are averaged over all workers when the loop over the batch ends. Then clip, and call `optim.step()`
        and `optim.zero_grad()`. Raises RuntimeError outside of a loop over a batch, and SyncError when a peer is lost.

        Example::

            for batch in worker.batches(dataset):
                for x, y in batch:
                    worker.backward(torch.nn.functional.mse_loss(model(x), y))
                optim.step()
                optim.zero_grad()
        """
        self._loop.executor.backward(loss)

    def clip_gradients(self, max_norm: float | None = None, *, max_value: float | None = None) -> Tensor:
        """Bound the averaged gradients, in the plain loop; returns their global norm before clipping (0-d).

        `max_norm` bounds the global norm, as `torch.nn.utils.clip_grad_norm_`, for every layout: workers with parts of
        the gradients add up their squares. `max_value` brings each number into [-max_value, max_value]. Call it between
        the loop over a batch and `optim.step()`. Raises ValueError unless one of them is given, and is more than 0, and
        RuntimeError elsewhere.

        Example::

            for batch in worker.batches(dataset):
                for x, y in batch:
                    worker.backward(torch.nn.functional.mse_loss(model(x), y))
                norm = worker.clip_gradients(1.0)
                optim.step()
                optim.zero_grad()
        """
        if (max_norm is None) == (max_value is None):
            raise ValueError("clip_gradients() needs either max_norm or max_value, such as clip_gradients(1.0)")
        if not (max_norm or max_value or 0) > 0:
            raise ValueError(
                f"clip_gradients(max_norm={max_norm}, max_value={max_value}): the bound must be more than 0"
            )
        return self._loop.clip(max_norm, max_value=max_value)

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
        """Return exact means over a dataset with len() and [], equal on all workers.

        No sample is padded or counted twice. `dataset` may be a torch DataLoader: its dataset, collate_fn, batch_size
        (as `micro`), num_workers, prefetch_factor, pin_memory and worker_init_fn are taken over; with drop_last, too,
        every sample counts.

        `measures` maps names to fn(output, target), which returns the mean over a micro-batch or (sum, count). One
        function alone is called "loss". `micro` samples are run at once (default: the plan's micro-batch).
        `forward(model, micro)` returns (output, target) for samples that are not (input, target). The model is in eval
        mode meanwhile, without gradients. Each worker runs its share; only sums and counts move between workers. So
        what a measure appends to a list is of one share; that is warned of.

        Raises TypeError for a dataset without len() or []; ValueError for an empty one, and for a loader whose sampler
        does not take each sample once; and RuntimeError inside a step.

        Example::

            means = worker.evaluate(model, dataset, {"mse": torch.nn.functional.mse_loss})
            assert means["mse"] >= 0
        """
        self._collectives.require_between_steps("worker.evaluate()")
        self._place.recorder.begin("evaluation", self.step)
        began = time.perf_counter()
        named = measures if isinstance(measures, Mapping) else {"loss": measures}
        data = read_evaluation(
            dataset,
            micro=micro,
            collate=_only_one("collate", collate, "collate_fn", collate_fn),
            default_micro=self._parts.sizes.samples,
        )
        data = dataclasses.replace(data, pin=data.pin and self.device.type == "cuda")
        # Replicas that are apart evaluate by themselves, on the weights that each has.
        place = self._parts.scope.place if self._loop.mode.is_apart else self._place

        def measure() -> dict[str, float]:
            with self._loop.mode.averaged():
                return evaluate(
                    model,
                    data,
                    named,
                    group=place.group,
                    device=self.device,
                    precision=self.plan.compute.precision,
                    seeds=(self.plan.batch.seed, 4, self.step),
                    timeout_s=self._parts.timeout_s,
                    forward=forward,
                    axes=place.axes,
                    shards=self._parts.executor.shards,
                    staged=self._models.layout.stages(model),
                )

        is_shared = place.group.size > 1
        before = Scan(holders_of_functions([*named.values(), forward], {})) if is_shared else None
        results = measure() if self._loop.mode.is_apart else self._collectives.together(measure)
        if before is not None and (kept := changed_places(before, Scan(before.holders))):
            names = ", ".join(dict.fromkeys(one.label for one in kept))
            self._loop.step_log.warn(
                f"a measure of worker.evaluate() keeps something of its own ({names}). Each worker has only what its "
                "share of the data has left there, so what is computed from it is not of the whole dataset. Return "
                "(sum, count), or gather it: worker.gather(...)",
                once=f"kept by measures: {names}",
            )
        took_s = time.perf_counter() - began
        shown = {name_text(name): value for name, value in results.items()}
        self._files.emit(Evaluated(step=self.step, num_samples=len(data.dataset), metrics=shown, duration_s=took_s))
        return results

    def report(self, **metrics: float | Tensor) -> None:
        """Note values of the latest step for the console, `metrics.jsonl` and the other sinks.

        They average a step's values over the workers that report them; not all need to. Outside of the loop over
        batches the values are shown at once. Raises TypeError or ValueError for what is no single number.

        Example::

            for batch in worker.batches(dataset):
                worker.report(loss=step(batch), lr=optim.param_groups[0]["lr"])
        """
        if not self._parts.executor.runs.is_under_way:  # a forward that counts for nothing
            self._loop.step_log.report(metrics)

    def __repr__(self) -> str:
        return f"<worker {self.rank} of {self.workers} on {self.device}, step {self.step}>"

    def _agree_on_order(self, request: DataRequest) -> None:
        """Raise SyncError where the order differs between workers; later newcomers could not take part."""
        is_fixed = self._consensus.elastic is None and not self._loop.mode.is_apart
        if is_fixed or not self._collectives.has_begun:
            request.require_one_order(self._collectives.gather(request.order_name))

    def _prepare_model(
        self, model: nn.Module, name: str | None, hints: ModelHints, buffers: Mapping[str, str] | None
    ) -> None:
        settle_foreign_model(model)
        self._models.layout.place(model, device=self.device, is_fresh=self._prepared.is_fresh(model, name), hints=hints)
        slices, owners, tables = (
            self._models.layout.slices(model),
            self._models.layout.owners(model),
            server_table_names(model, self._tables),
        )
        self._models.add(
            model, self._prepared.model(model, name, slices=slices, owners=owners, tables=tables, buffers=buffers)
        )
        self._models.layout.guard_state(model)
        forget_origins(model.parameters())  # from now on weights change, and states fill them
        keep_in_memory(model)


def _only_one(name: str, value: T | None, alias: str, other: T | None) -> T | None:
    """Return what was given under either of two names; ValueError where both were."""
    if value is not None and other is not None:
        raise ValueError(f"{name}={value!r} and {alias}={other!r} are two names of one option; give {name}")
    return other if value is None else value


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}_{number}") in taken:
        number += 1
    return candidate
