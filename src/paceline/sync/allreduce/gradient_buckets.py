"""Divides a model's parameters into gradient buckets, as DDP does, and keeps what their codecs remember between steps.

A replica may be split over several workers. Each then sums what it holds with the workers of other replicas that hold
the same. Parameters of other pipeline stages are on the meta device here: they are in no local bucket, but in every
worker's step metadata.

Where several workers of a replica hold the same gradient (a norm beside tensor parallel layers), each sums it by
itself, and all must get the same bits. But codecs round by neighboring numbers and by random draws. So such gradients
travel in buckets that are equal on all of these workers, with equal seeds.

Some parameters may have fewer replicas than the others (expert parallel): their gradients go in buckets of their own,
to the workers that hold the same experts.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.group import SingleWorkerGroup, WorkerGroup, total
from paceline.comm.sharded_tensors import local_part
from paceline.plan import AllReduce, Wire
from paceline.schedule.sample_order import mix
from paceline.sync.allreduce.adasum import AdasumBucket, AdasumWeights
from paceline.sync.allreduce.bucket_pipeline import AnyBucket, BucketPipeline
from paceline.sync.allreduce.buckets import Bucket, LocalBucket, NamedParameter, SentBytes, WireObserver, assign
from paceline.sync.allreduce.gradient_norm import GradientNorm
from paceline.sync.allreduce.gradient_sharding import GradientSharding
from paceline.sync.allreduce.replica_norms import ReplicaNorms
from paceline.sync.allreduce.sealed_gradients import SealedGradients

__all__ = ["CodecMemory", "GradientBuckets", "sum_residuals"]

SPARE_METADATA = 256  # room for numbers of a gradient pass beside one for each parameter


class GradientBuckets(ABC):
    """The buckets of a set of named parameters; a parameter with several names counts once."""

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        *,
        group: WorkerGroup,
        sync: AllReduce,
        wire: Wire,
        seed: int = 0,
        all_workers: WorkerGroup | None = None,
        shard_group: WorkerGroup | None = None,
        is_used: Callable[[Parameter], bool | None] | None = None,
        shardings: Sequence[GradientSharding] = (),
        group_for: Callable[[Parameter], WorkerGroup | None] | None = None,
        holders: Callable[[Parameter], Hashable] | None = None,
    ) -> None:
        """`group`: the workers that hold the same numbers. `all_workers`: all workers of the run; the group by default.

        `shard_group`: the workers of this replica that hold the other rows of the same gradients. `is_used(parameter)`:
        whether this worker's runs gave it a gradient; without it, or if it returns None, the presence of a gradient
        decides. `shardings`: how gradients are distributed over the replica's other workers, along each axis (tensor,
        pipeline, expert). `group_for(parameter)`: the workers that hold the same numbers of a parameter, if that is not
        `group`; each of them must have the same number of such parameters, of the same sizes and in the same order.
        `holders(parameter)`: which workers of the replica hold exactly the same gradient before it is summed, equal on
        all of them; by default this follows from `shardings`.
        """
        unique = {id(parameter): (name, parameter) for name, parameter in reversed(list(parameters))}
        self._all = list(reversed(unique.values()))
        self._parameter_ids = frozenset(unique)
        self._sealed = SealedGradients()
        self._device = next((p.device for _, p in self._all if not p.is_meta), torch.device("cpu"))
        self._group, self._sync, self._wire, self._seed = group, sync, wire, seed
        self._all_workers = group if all_workers is None else all_workers
        self._shard_group = shard_group or SingleWorkerGroup()
        self._is_used, self._shardings, self._group_for = is_used, tuple(shardings), group_for
        self._holders = holders or self._holders_by_sharding
        self._norms = GradientNorm(shard_group=self._shard_group, shardings=self._shardings, device=self._device)
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._trained: set[int] = set()  # places in `_all` of parameters that require gradients, or once did
        self._trained_places: list[int] = []  # the same, sorted: the order of the step metadata
        self._buckets: list[AnyBucket] = []
        self._metadata_buckets: set[int] = set()  # buckets that all workers sum, so the step metadata can go with them
        self._pipeline = BucketPipeline()
        self._sums_over: list[WorkerGroup] = []  # the groups of the buckets
        self._is_stale = False
        self._memory: CodecMemory | None = None  # for the next buckets; None: that of the current ones
        self._cold: dict[int, set[int]] = {}  # by gradient pass within a step: buckets that no worker used last time
        self._bytes_before = SentBytes()
        self._metadata_capacity = 0
        self._combination: AdasumWeights | None = None
        self._parts = ReplicaNorms(group, is_measured=lambda _: False)
        self.parameters: list[Parameter] = []  # those that are summed here, in the order in which they are sent
        self.names: list[str] = []
        self._encoded_before_s = 0.0
        self._step = self._gradient_pass = 0
        self._arrived: set[int] = set()  # places of gradients that came in this gradient pass
        self._wire_observer: WireObserver | None = None

    @abstractmethod
    def _gradient_arrived(self, bucket: int, place: int, parameter: Tensor) -> None:
        """Called by autograd when it has accumulated the gradient of the parameter at `place` of `parameters`."""

    def members_changed(self) -> None:
        """Rebuild the buckets before the next gradient pass, because the group's members have changed."""
        self._is_stale = True
        self._trained.clear()

    def memory(self) -> CodecMemory:
        """Return what codecs remember of committed steps, by parameter name; not copied."""
        if self._memory is not None:
            return self._memory
        own: dict[str, Tensor] = {}
        common: dict[str, dict[str, Tensor]] = {}
        for bucket in self._buckets:
            own.update(bucket.own())
            common.update(bucket.common())
        return CodecMemory(own, common)

    def gathered_own(self, *, keeps: bool) -> dict[str, list[Tensor]]:
        """Return each replica's error feedback by parameter name; of partial gradients, the sum over its workers.

        All workers must call it, and it blocks. A worker without `keeps` takes part for the others, bucket by bucket,
        and gets nothing.
        """
        if self._is_stale or not self._buckets:
            self._build({place for place, (_, p) in enumerate(self._all) if p.requires_grad} | self._trained)
        partial = {name for name, one in self._all if any(sharding.adds_up(one) for sharding in self._shardings)}
        found: dict[str, list[Tensor]] = {}
        for bucket in self._buckets:
            parts = bucket.gathered_own()
            found.update(parts if keeps else {name: parts[name] for name in parts.keys() & partial})
        for sharding in self._shardings:
            sum_residuals(found, self._all, sharding=sharding, count=self._group.size, device=self._device)
        return found if keeps else {}

    def remember(self, memory: CodecMemory) -> None:
        """Continue with what codecs remembered elsewhere; parameters that it does not know begin without memory."""
        self._memory = memory
        self._is_stale = True  # until the next gradient pass

    @property
    def named(self) -> Sequence[NamedParameter]:
        """All registered parameters, each under one of its names."""
        return self._all

    def observe_wire(self, observer: WireObserver) -> None:
        """From now on, follow what a wire with error feedback sends and keeps."""
        self._wire_observer = observer
        for bucket in self._buckets:
            if type(bucket) is Bucket:  # one that sums
                bucket.observer = observer

    def has(self, parameter: Tensor) -> bool:
        """Return whether `parameter` is one of those that were registered."""
        return id(parameter) in self._parameter_ids

    def sent_beside(self, num_bytes: int) -> None:
        """Count bytes that went to other replicas in another way."""
        self._bytes_before += SentBytes(num_sent=num_bytes)

    @property
    def bytes(self) -> SentBytes:
        """What went to other replicas since the beginning."""
        return sum((bucket.bytes for bucket in self._buckets), self._bytes_before)

    @property
    def encoding_s(self) -> float:
        """Total time of codecs since the beginning."""
        return self._encoded_before_s + sum(bucket.encoding_s for bucket in self._buckets)

    def largest_bucket(self) -> list[tuple[int, int]]:
        """Return the matrices of the largest bucket that goes to other replicas; empty if there is none."""
        each = [bucket.shapes for bucket in self._buckets if isinstance(bucket, Bucket)]
        return max(each, key=lambda shapes: sum(rows * columns for rows, columns in shapes), default=[])

    def _build(self, trained: set[int]) -> None:
        memory = self.memory().copied() if self._memory is None else self._memory
        self._bytes_before, self._is_stale, self._memory = self.bytes, False, None
        self._encoded_before_s = self.encoding_s
        for hook in self._hooks:
            hook.remove()
        self._trained, self._cold = trained, {}
        self._trained_places = sorted(trained)
        here = [self._all[place] for place in self._trained_places if not self._all[place][1].is_meta]
        self._metadata_capacity = len(trained) + 2 * self._group.size + SPARE_METADATA
        self._buckets, self._metadata_buckets = [], set()
        combines = self._sync.op == "adasum" and self._group.size > 1
        size = self._sync.bucket_bytes
        runs = assign(here, bucket_bytes=size, group_of=self._group_of, kind_of=self._holders)
        self._sums_over = list({id(group): group for group, _ in runs}.values())
        for group, run in runs:
            if group.size == 1:
                self._buckets.append(self._staying(run, group))
                continue
            if combines:
                self._buckets.append(AdasumBucket(run, group=group, wire=self._wire))
                continue
            metadata_capacity = 0
            if group is self._all_workers:
                self._metadata_buckets.add(len(self._buckets))
                metadata_capacity = self._metadata_capacity
            self._buckets.append(Bucket(run, group=group, wire=self._wire, metadata_capacity=metadata_capacity))
        self._combination = self._combination_of(self._buckets) if combines else None
        measured = {id(parameter) for _, parameter in here if self._is_measured(parameter)}
        self._parts = ReplicaNorms(self._group, is_measured=lambda parameter: id(parameter) in measured)
        for bucket in self._buckets:
            bucket.fill(memory.own, memory.common)
        if self._wire_observer is not None:
            self.observe_wire(self._wire_observer)
        self.parameters = [parameter for bucket in self._buckets for parameter in bucket.parameters]
        self.names = [name for bucket in self._buckets for name in bucket.names]
        self._hooks = []
        place = 0
        for number, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters:
                arrived = functools.partial(self._gradient_arrived, number, place)
                is_frozen = not parameter.requires_grad  # it was trained once, and may be thawed again
                if is_frozen:
                    parameter.requires_grad_(True)  # torch takes no hook else
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
                if is_frozen:
                    parameter.requires_grad_(False)
                place += 1

    def _combination_of(self, buckets: Sequence[AnyBucket]) -> AdasumWeights:
        place_of = {id(self._all[place][1]): number for number, place in enumerate(self._trained_places)}
        return AdasumWeights(
            [bucket for bucket in buckets if isinstance(bucket, AdasumBucket)],
            group=self._group,
            place_of=lambda parameter: place_of[id(parameter)],
            counts=self._norms.counts,
            num_places=len(self._trained_places),
        )

    def _staying(self, run: Sequence[NamedParameter], group: WorkerGroup) -> LocalBucket:
        """Return the bucket of parameters that no other replica holds: `group` is of one."""
        return LocalBucket(run)

    def _is_measured(self, parameter: Parameter) -> bool:
        """Return whether a replica has its own gradient before any sum, and this worker's local part counts."""
        is_part = any(sharding.adds_up(parameter) for sharding in self._shardings)
        return not is_part and self._norms.counts(parameter) and self._group_of(parameter) is self._group

    def _group_of(self, parameter: Parameter) -> WorkerGroup:
        """Return the workers that hold the same numbers."""
        return (None if self._group_for is None else self._group_for(parameter)) or self._group

    def _holders_by_sharding(self, parameter: Parameter) -> Hashable:
        """Return which workers of the replica have the same gradient along each axis; () where each has a part."""
        return tuple(() if sharding.adds_up(parameter) else sharding.holders(parameter) for sharding in self._shardings)

    def _seed_of(self, number: int) -> int:
        """Return the seed of a codec's random rounding.

        It differs between steps and replicas, is the same when a step is repeated, and equal on all workers of the
        replica that have the same bucket, though its number may differ there.
        """
        bucket = self._buckets[number]
        first = bucket.parameters[0]
        # Parts of one sum are rounded with different seeds, because correlated errors would not average out.
        parts = [
            sharding.group.index
            for sharding in self._shardings
            if not sharding.holders(first) or sharding.adds_up(first)
        ]
        place = self._group_of(first).index
        return (
            mix(self._seed, self._step, self._gradient_pass, zlib.crc32(bucket.names[0].encode()), place, *parts) >> 1
        )

    @property
    def num_trained(self) -> int:
        """How many parameters are summed, on all workers together."""
        return len(self._trained_places)


@dataclasses.dataclass(frozen=True, slots=True)
class CodecMemory:
    """What one worker's codecs remember from step to step, by parameter name: it outlives buckets and members."""

    own: Mapping[str, Tensor]  # this replica's error feedback, in the shape of the local part of the parameter
    common: Mapping[str, Mapping[str, Tensor]]  # what all replicas know

    def copied(self) -> CodecMemory:
        """Return a copy that later steps do not change."""
        return CodecMemory(
            {name: tensor.clone() for name, tensor in self.own.items()},
            {name: {key: tensor.clone() for key, tensor in named.items()} for name, named in self.common.items()},
        )


def sum_residuals(
    owed: dict[str, list[Tensor]],
    named: Sequence[tuple[str, Parameter]],
    *,
    sharding: GradientSharding,
    count: int,
    device: torch.device,
) -> None:
    """Replace the error feedback of each of `count` replicas by the sum over the sharding's workers, in place.

    It concerns parameters whose gradients are partial sums. All workers of `sharding` must call it with the same names;
    blocks.
    """
    partial = [sharding.adds_up(parameter) for _, parameter in named]
    known = [float(is_part and name in owed) for (name, _), is_part in zip(named, partial, strict=True)]
    numbers = total(sharding.group, known, what="whose parts are still to be sent", device=device)
    some = zip(named, partial, numbers, strict=True)
    here = [one for one, is_part, number in some if is_part and number and not one[1].is_meta]
    for name, parameter in here:
        if name not in owed:  # only other workers have error feedback for it
            like = local_part(parameter)
            owed[name] = [torch.zeros_like(like, dtype=torch.float32) for _ in range(count)]
    for replica in range(count):
        sharding.add_up([(parameter, owed[name][replica]) for name, parameter in here])
