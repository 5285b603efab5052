"""A DataLoader as `Accelerator.prepare` returns it: it gives this worker's batches, of a loop that trains or evaluates.

Which of the two a loop is shows in what the program does: it evaluates where gradients are off, where all models are in
eval mode, and where the first batches got no `backward`. A loop that trains gives the micro-batches of the run's
steps, with its ledger and checkpoints. One that evaluates shares the loader's batches among the workers. At the uneven
end a worker without a batch gets one again, of which `gather_for_metrics` keeps nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from paceline.compat.accelerate.flat_loop import FlatLoop, NotTraining, StepShape
from paceline.compat.accelerate.loader_order import (
    OrderedDataset,
    batches_of,
    checksum_of,
    is_iterable,
    order_generator,
    require_whole_batches,
    restore_order,
    seed_order,
)
from paceline.compat.accelerate.program_state import LoaderProgress, ProgramState
from paceline.compat.accelerate.world import ProgramWorld
from paceline.errors import PlanError
from paceline.parallel.precision import computing_body, input_dtype
from paceline.worker.data import random_state
from paceline.worker.data.batch_stream import StreamSource
from paceline.worker.data.step_batch import to_device
from paceline.worker.run_member import parts_of
from paceline.worker.stateful_member import loop_of
from paceline.worker.worker import Worker

__all__ = ["LoaderContext", "PreparedLoader"]


class LoaderContext:
    """What all prepared loaders of a program share."""

    def __init__(self, worker: Worker, flat: FlatLoop, world: ProgramWorld, state: ProgramState) -> None:
        self.worker, self.flat, self.world, self.state = worker, flat, world, state
        self.models: list[nn.Module] = []
        self.slots: Callable[[], int] = lambda: 1  # batches that are accumulated
        self.splits_batches = False
        self.places = True  # puts batches on the device
        self.is_loaded = False  # the program itself has loaded a state: its loops begin where that says
        self.num_streams = 0
        self._num_evaluating = 0  # loops that have given a batch, and not asked for the next one
        self._computing = contextlib.ExitStack()

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """What surrounds a batch of a loop that evaluates: the default type of fp64, as where a loop trains.

        Loops side by side, as of zip(...), end in any order: the first one begins it, and the last one ends it.
        """
        if self._num_evaluating == 0:
            self._computing.enter_context(computing_body(self.worker.plan.compute.precision, self.worker.device))
        self._num_evaluating += 1
        try:
            yield
        finally:
            self._num_evaluating -= 1
            if self._num_evaluating == 0:
                self._computing.close()

    def name_stream(self) -> str:
        """A name for the next loader that trains."""
        self.num_streams += 1
        return "train" if self.num_streams == 1 else f"train_{self.num_streams}"

    @property
    def may_train(self) -> bool:
        """Whether a loop that begins now may be one that trains."""
        has_optimizers = bool(parts_of(self.worker).prepared.own_optimizers())
        return has_optimizers and torch.is_grad_enabled() and not self.flat.in_pass

    @property
    def in_eval_mode(self) -> bool:
        """Whether no model is in train mode."""
        return not any(model.training for model in self.models)


class PreparedLoader:
    """Iterable, with a length, and with the attributes of the DataLoader that it stands for."""

    def __init__(self, loader: DataLoader[Any], context: LoaderContext) -> None:
        self.loader = loader
        self._context = context
        self._stream: str | None = None  # set by the first loop that trains
        self._was_evaluated = False
        self._num_loops = 0  # that train
        self._begins_at = 0  # batches that the next loop leaves out
        # With split batches the order is that of one process, on any number of them.
        is_of_many = context.world.processes > 1 and not context.splits_batches and not is_iterable(loader)
        self._is_seeded = is_of_many and seed_order(loader)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet: while a copy is made
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Batches of each process; of a loader that evaluates, of each worker."""
        world, num_batches = self._context.world, len(self.loader)
        if self._was_evaluated and self._stream is None:
            return -(-num_batches // world.size)
        if self._context.splits_batches:
            return num_batches
        return num_batches // world.processes if self.loader.drop_last else -(-num_batches // world.processes)

    @property
    def total_batch_size(self) -> int:
        """Samples of a batch of all processes."""
        return (self.loader.batch_size or 1) * (1 if self._context.splits_batches else self._context.world.processes)

    @property
    def total_dataset_length(self) -> int:
        """Samples of the dataset."""
        return len(self.loader.dataset)  # pyright: ignore[reportArgumentType]  # of data with a length

    def set_epoch(self, epoch: int) -> None:
        """Tell the samplers and the dataset the epoch, where they want to know it."""
        for one in (self.loader.sampler, self.loader.batch_sampler, self.loader.dataset):
            if callable(found := getattr(one, "set_epoch", None)):
                found(epoch)

    def begin_at(self, num_batches: int) -> None:
        """The next loop leaves out so many batches."""
        self._begins_at = num_batches

    def __iter__(self) -> Iterator[Any]:
        # Decided where it begins to read: zip(...) makes the iterators of all loaders first.
        skipped, self._begins_at = self._begins_at, 0
        context = self._context
        context.flat.leave_unused()
        is_beside = self._was_evaluated and context.flat.in_loop  # an evaluation between the steps of a training loop
        is_training = context.may_train and not is_beside and not context.in_eval_mode
        yield from self._train(skipped) if is_training else self._evaluate(self._drawn(), skipped)

    # A loop that trains.

    def _train(self, skipped: int) -> Iterator[Any]:
        context, flat = self._context, self._context.flat
        if self._stream is None:
            self._stream = context.name_stream()
        progress = context.state.loader(self._stream)
        if not self._begin(progress):
            return
        generator = order_generator(self.loader)
        progress.random = random_state.capture_random_state()
        if generator is not None:
            progress.random["order"] = generator.get_state()
        batches = self._drawn()
        progress.order = generator.get_state() if generator is not None else None
        shape = self._shape()
        source = self._source(self._stream, batches, shape, epochs=progress.epoch + 1)
        begin = self._beginning(skipped, shape, progress)
        seed, drawn = self._agreed_seed(), random_state.capture_random_state()
        number = flat.open(source, shape, begin=begin, seed=seed)
        if begin is not None:  # the first loop of a run that goes on has set it to that of the checkpoint
            random_state.restore_random_state(drawn)
        num_given = 0
        try:
            for data in self._micro_batches(number):
                num_given += 1
                yield data
        except NotTraining:
            self._forget(progress)
            yield from self._evaluate(batches, 0, after=num_given * context.world.size)
            return
        if not flat.is_stopped:
            progress.is_over = True

    def _micro_batches(self, number: int) -> Iterator[Any]:
        """The batches of a loop that trains. One that is left inside of a step leaves no pass open. Raises
        NotTraining."""
        flat, is_at_end = self._context.flat, False
        try:
            while True:
                try:
                    data = flat.next_data()
                except StopIteration:
                    is_at_end = True
                    return
                yield data
        finally:
            flat.leave(number, is_at_end=is_at_end)

    def _begin(self, progress: LoaderProgress) -> bool:
        """Count a loop; returns whether any of its epoch is left. A checkpoint may stand in it, or after it."""
        context, number = self._context, self._num_loops
        self._num_loops += 1
        saved = context.state.saved.pop(str(self._stream), None) if context.is_loaded else None
        if saved is not None:  # the program's next loop is what the state that it has loaded says
            is_over = saved["is_over"] or self._is_at_end()
            number = saved["epoch"] + int(is_over)
            self._num_loops = number + 1
            self._restore_order(saved, is_over=is_over)
            if not is_over:
                random_state.restore_random_state(saved["random"])
        elif (saved := context.state.saved.get(str(self._stream))) is not None:
            # The run goes on, and the program does not know it: loops that are done have nothing left.
            if number == saved["epoch"]:
                self._restore_order(saved, is_over=saved["is_over"])
            if number == saved["epoch"] and saved["is_over"] and context.state.random is not None:
                random_state.restore_random_state(context.state.random)
            if number < saved["epoch"] or (number == saved["epoch"] and saved["is_over"]):
                progress.load_state_dict(saved)
                return False
            if number == saved["epoch"]:
                random_state.restore_random_state(saved["random"])
        progress.epoch, progress.is_over = number, False
        return not context.flat.is_stopped

    def _restore_order(self, saved: Mapping[str, Any], *, is_over: bool) -> None:
        """Have the loader's own generator be where it was: before it drew the epoch's order, or after that."""
        state = saved.get("order") if is_over else saved["random"].get("order")
        restore_order(self.loader, state, is_seeded=self._is_seeded)

    def _is_at_end(self) -> bool:
        """Whether the stream's position is behind the last sample of its epoch."""
        position = loop_of(self._context.worker).between.positions.saved(str(self._stream))
        return position.of is not None and 0 < position.of.samples <= position.position

    def _forget(self, progress: LoaderProgress) -> None:
        """The loop was none that trains; a loader without any has no stream."""
        self._num_loops -= 1
        progress.epoch, progress.is_over = progress.epoch - 1, True
        if self._num_loops:
            return
        loop_of(self._context.worker).streams.pop(str(self._stream), None)
        if self._stream is not None:
            del self._context.state.loaders[self._stream]
            self._context.num_streams -= 1
            self._stream = None

    def _drawn(self) -> list[list[Any]] | None:
        """The epoch's batches, equal on all workers; None: the dataset is iterable. An operation of all workers."""
        if is_iterable(self.loader):
            return None
        batches = batches_of(self.loader)
        world = self._context.world
        if world.size * world.num_same > 1 and not self._context.flat.in_pass:
            sums = world.everywhere(checksum_of(list(itertools.chain.from_iterable(batches))))
            if len(set(sums)) > 1:  # random states differ between workers: the first one's order counts
                batches = world.everywhere(batches if world.index == 0 else None)[0]
        return batches

    def _agreed_seed(self) -> int:
        return int(self._context.world.everywhere(torch.initial_seed())[0]) & (2**63 - 1)

    def _shape(self) -> StepShape:
        context, size = self._context, self.loader.batch_size or self._sampler_size()
        processes = context.world.processes
        if not context.splits_batches:
            return StepShape(micro=size, slot=size * processes, slots=context.slots())
        if size % processes:
            raise PlanError(
                f"split_batches=True splits batches of {size} samples over {processes} processes: use a batch_size "
                f"that is a multiple of {processes}."
            )
        return StepShape(micro=size // processes, slot=size, slots=context.slots())

    def _sampler_size(self) -> int:
        size = getattr(self.loader.batch_sampler, "batch_size", None)
        if isinstance(size, int) and size > 0:
            return size
        raise PlanError(
            f"the batch sampler {type(self.loader.batch_sampler).__name__} of a DataLoader that trains has no "
            "batch_size: give it this attribute, or use a sampler= with batch_size=."
        )

    def _source(self, name: str, batches: list[list[Any]] | None, shape: StepShape, *, epochs: int) -> StreamSource:
        loader, dataset = self.loader, self.loader.dataset
        if batches is not None:
            require_whole_batches(batches, shape.slot if self._context.splits_batches else shape.micro)
            indices = list(itertools.chain.from_iterable(batches))
            if loader.drop_last:  # also what does not fill the batches of all processes
                indices = indices[: len(indices) // shape.slot * shape.slot]
            if not indices:
                raise PlanError(
                    f"a DataLoader that trains has no batch: {len(loader)} of {shape.micro} samples, for "
                    f"{self._context.world.processes} processes, with drop_last={loader.drop_last}."
                )
            dataset = OrderedDataset(dataset, indices)
        return StreamSource(
            dataset=dataset,
            epochs=epochs,
            collate=loader.collate_fn,
            loaders=loader.num_workers if batches is not None else min(loader.num_workers, 1),
            prefetch=loader.prefetch_factor or 2,
            pin=self._context.worker.device.type == "cuda",
            name=name,
            begin_loader=loader.worker_init_fn,
            has_equal_runs=True,
        )

    def _beginning(self, skipped: int, shape: StepShape, progress: LoaderProgress) -> tuple[int, int] | None:
        """Epoch and position at which the loop begins; None: where a checkpoint stands inside of this epoch."""
        loop, name = loop_of(self._context.worker), str(self._stream)
        saved = loop.between.positions.saved(name)
        if name not in loop.streams and saved.epoch == progress.epoch and saved.position > 0:
            return None
        runs = -(-shape.slots * self._context.world.processes // self._context.world.size)  # in a step, on each worker
        if skipped % runs:
            raise ValueError(
                f"skip_first_batches(..., {skipped}): {runs} batches make a step on this worker, and only whole steps "
                f"can be left out: use a multiple of {runs}"
            )
        return progress.epoch, skipped // runs * shape.size

    # A loop that evaluates.

    def _evaluate(self, batches: list[list[Any]] | None, skipped: int, *, after: int = 0) -> Iterator[Any]:
        """Give this worker's share of the batches, behind the first `after` of all and the first `skipped` here."""
        self._was_evaluated = True
        index, size = self._context.world.index, self._context.world.size
        if batches is None:
            given = self._shared(iter(self.loader), after)
        else:
            left = batches[after:]
            num_rounds = -(-len(left) // size)
            own = left[index::size]
            rows = [(len(batch), len(batch)) for batch in own]
            if len(own) < num_rounds:
                own.append(own[-1] if own else left[0])
                rows.append((len(own[-1]), 0))
            given = zip(rows, self._reader(own), strict=False)
        for handed, data in itertools.islice(given, skipped, None):
            yield from self._given(handed, data)

    def _given(self, handed: tuple[int, int], data: Any) -> Iterator[Any]:
        worker, flat = self._context.worker, self._context.flat
        if self._context.places:
            data = to_device(data, worker.device, input_dtype(worker.plan.compute.precision))
        if flat.in_pass:  # beside another loader, which trains
            yield data
            return
        flat.handed = handed
        with self._context.evaluating():
            yield data

    def _reader(self, own: list[list[Any]]) -> Iterator[Any]:
        loader = self.loader
        options: dict[str, Any] = {}
        if loader.num_workers:
            options = {"prefetch_factor": loader.prefetch_factor, "worker_init_fn": loader.worker_init_fn}
        return iter(
            DataLoader(
                loader.dataset,
                batch_sampler=own,
                collate_fn=loader.collate_fn,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory,
                timeout=loader.timeout,
                generator=torch.Generator(),  # its own: the program's random state has given its seed already
                **options,
            )
        )

    def _shared(self, read: Iterator[Any], after: int) -> Iterator[tuple[tuple[int, int], Any]]:
        """An iterable's batches, which every worker reads, and of which it keeps its own."""
        index, size = self._context.world.index, self._context.world.size
        for _ in range(after):
            next(read, None)
        while together := list(itertools.islice(read, size)):
            is_own = index < len(together)
            data = together[index if is_own else 0]
            rows = _num_rows(data)
            yield (rows, rows if is_own else 0), data


def _num_rows(data: Any) -> int:
    """How many samples a batch has: the length of its first tensor."""
    leaves = data.values() if hasattr(data, "values") else data if isinstance(data, (list, tuple)) else [data]
    return next((len(leaf) for leaf in leaves if hasattr(leaf, "__len__")), 0)
