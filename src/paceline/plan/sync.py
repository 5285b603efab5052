"""Sync says how replicas agree on an update: one class for each way.

Each class also says two things about a run in which something goes wrong, with numbers as they are (`Raw`): whether its
losses stay those of an undisturbed run, to rounding, `exact_with_fewer` replicas, and where all go on `exact_again`
from a checkpoint.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar, Literal, TypeAlias

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import PlanPart
from paceline.units import MiB

__all__ = ["AllReduce", "Gossip", "LocalSGD", "Nesterov", "ParameterServer", "Sync"]

Algorithm: TypeAlias = Literal["auto", "ring", "tree", "halving", "hierarchical"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class AllReduce(PlanPart):
    """Every replica gets the weighted mean of all gradients, by all-reduce in buckets, while backward still runs.

    `bucket_bytes` counts gradients in memory, before the wire compresses them. `algorithm` is how a bucket is summed: a
    "ring", two trees ("tree"), recursive "halving", or "hierarchical" (inside each host first). With n workers "ring"
    sends 2 (n - 1) / n of the bucket from each. "auto" sums in shared memory if all workers are on one host. Otherwise
    it takes the fastest by measurement.

    `op="adasum"` combines two replicas' gradients a and b for each parameter as `a (1 - <a,b> / 2|a|²) + b (1 - <a,b> /
    2|b|²)`, and more of them in a tree (Maleki et al. 2020).

    Raises PlanError for `bucket_bytes` below 1, and for "adasum" with an `algorithm`.

    Example::

        plan = paceline.Plan(sync=paceline.AllReduce(algorithm="ring"))
        assert str(plan) == "allreduce(algorithm=ring)"
    """

    exact_again: ClassVar[bool] = True

    op: Literal["mean", "adasum"] = "mean"
    algorithm: Algorithm = "auto"
    bucket_bytes: int = 8 * MiB

    def __post_init__(self) -> None:
        check_fields(self)
        _require_bytes(self, self.bucket_bytes)
        if self.op == "adasum" and self.algorithm != "auto":
            raise PlanError(
                f"AllReduce.algorithm is {self.algorithm!r} with op='adasum', which has an algorithm of its own. Leave "
                "algorithm out, or use op='mean'."
            )

    @property
    def exact_with_fewer(self) -> bool:
        """Adasum takes other steps with another number of replicas."""
        return self.op == "mean"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class ParameterServer(PlanPart):
    """Parameters and optimizer live on `servers` processes; replicas push gradients to them and pull weights.

    `staleness` bounds the updates between the weights that a gradient was computed on and those that it is applied to.
    0: all replicas split each batch, and every step is one update with the losses of one process. s: each replica takes
    a whole batch at a time, and each batch is one update (bounded staleness). None: the same, without a bound. Replicas
    may join and leave with `Layout(replicas=(least, most))`, except with `drop`.

    `drop=n` has n backup workers (Chen et al. 2016). An update is made of the first shares of a batch, from all
    replicas but n; the gradients of the slowest n are discarded. `mirrored` gives each server a second process that
    takes its place when it is lost, without a lost step. The price is the servers' memory and the optimizer's work
    twice, and each step's sums once more over the network. `bucket_bytes` counts the gradients that travel together.

    Each parameter lies whole on one server. Tables of embeddings with `sparse=True` are split by rows, and only the
    rows that a step touches move. Raises PlanError for negative numbers, `drop` with `staleness`, and `mirrored` with
    either.

    Example::

        plan = paceline.Plan(layout=paceline.Layout(replicas=4), sync=paceline.ParameterServer(staleness=6))
        assert str(plan) == "replicas=4+parameterserver(staleness=6)"
    """

    servers: int = 1
    staleness: int | None = 0
    drop: int = 0
    mirrored: bool = False
    bucket_bytes: int = 8 * MiB

    def __post_init__(self) -> None:
        check_fields(self)
        _require_bytes(self, self.bucket_bytes)
        if self.servers < 1:
            raise PlanError(f"ParameterServer.servers is {self.servers}; it must be at least 1.")
        if self.staleness is not None and self.staleness < 0:
            raise PlanError(
                f"ParameterServer.staleness is {self.staleness}; it must be 0 (synchronous), the number of updates "
                "that weights may be behind, or None (no bound)."
            )
        if self.drop < 0:
            raise PlanError(
                f"ParameterServer.drop is {self.drop}; it must be 0 or more (the number of backup workers)."
            )
        if self.drop and self.staleness != 0:
            raise PlanError(
                f"ParameterServer.drop is {self.drop} with staleness={self.staleness}: replicas that take batches of "
                "their own do not wait for slow ones anyway. Use staleness=0, or drop=0."
            )
        if self.mirrored and (self.staleness != 0 or self.drop):
            other = f"drop={self.drop}" if self.drop else f"staleness={self.staleness}"
            raise PlanError(
                f"ParameterServer.mirrored is True with {other}: mirrors follow steps that all replicas share, and no "
                "shares or updates of single ones yet. Leave one of the two out; without mirrors all begin again from "
                "the newest checkpoint where a server is lost."
            )

    @property
    def exact_with_fewer(self) -> bool:
        """Where replicas do not wait for all, losses depend on which was fast, even without a fault."""
        return self.staleness == 0 and not self.drop

    @property
    def exact_again(self) -> bool:
        """As `exact_with_fewer`."""
        return self.exact_with_fewer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Nesterov(PlanPart):
    """An outer optimizer for `LocalSGD`: SGD with Nesterov's momentum on the replicas' average move in a round.

    With the average move d, m = momentum m + d, and the weights before the round change by lr (momentum m + d). DiLoCo
    (Douillard et al. 2023) is `LocalSGD(every=500, outer=Nesterov(lr=0.7, momentum=0.9))`. With lr=1 and momentum=0 the
    weights become the replicas' average, as without an outer optimizer. Each worker keeps m, 4 bytes for each fp32
    parameter. Raises PlanError for lr of 0 and below, and momentum outside 0 to below 1.

    Example::

        plan = paceline.Plan(sync=paceline.LocalSGD(every=500, outer=paceline.Nesterov(lr=0.7, momentum=0.9)))
        assert paceline.Plan.parse("localsgd(every=500,outer=nesterov)") == plan
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.lr < math.inf:
            raise PlanError(f"Nesterov.lr is {self.lr}; it must be more than 0 (0.7 is the paper's).")
        if not 0 <= self.momentum < 1:
            raise PlanError(f"Nesterov.momentum is {self.momentum}; it must be from 0 to below 1 (0.9 is the paper's).")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class LocalSGD(PlanPart):
    """Each replica takes `every` steps by itself, on its share of each global batch; then all agree on weights.

    They become the average of the replicas' weights, weighted by the samples that each has used (McMahan et al. 2017,
    Stich 2019), or what an `outer` optimizer makes of it (DiLoCo). Nothing travels between replicas before that.

    Streaming (Douillard et al. 2025): `fragments=n` divides the parameters into n parts of about the same size, each
    with its own step within the `every` steps. A fragment travels while the next `overlap` steps are taken. When it
    arrives, the share `mixing` of the replica's own weights stays. With `keep_moves` the replica's own moves since then
    stay in full, on top of what was agreed (Shen et al. 2019). That takes 4 more bytes for each fp32 parameter under
    way.

    `algorithm` and `bucket_bytes` are those of `AllReduce`. Raises PlanError for values out of range, such as `overlap`
    of `every` and more.

    Example::

        plan = paceline.Plan(sync=paceline.LocalSGD(every=64, fragments=4, overlap=2, mixing=0.5))
        assert plan.check() == ()
    """

    exact_with_fewer: ClassVar[bool] = False
    exact_again: ClassVar[bool] = False  # a checkpoint has one replica's optimizer state, for all

    every: int
    outer: Nesterov | None = None
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.0
    keep_moves: bool = False
    algorithm: Algorithm = "auto"
    bucket_bytes: int = 8 * MiB

    def __post_init__(self) -> None:
        check_fields(self)
        _require_bytes(self, self.bucket_bytes)
        if self.every < 1:
            raise PlanError(f"LocalSGD.every is {self.every}; it must be at least 1 (64 is a good beginning).")
        if not 1 <= self.fragments <= self.every:
            raise PlanError(
                f"LocalSGD.fragments is {self.fragments}; it must be from 1 to every={self.every}: each fragment has a "
                "step of its own."
            )
        if not 0 <= self.overlap < self.every:
            raise PlanError(
                f"LocalSGD.overlap is {self.overlap}; it must be from 0 to below every={self.every}: what is agreed "
                "about a fragment lands before it is sent again."
            )
        if not 0 <= self.mixing < 1:
            raise PlanError(
                f"LocalSGD.mixing is {self.mixing}; it must be from 0 (what was agreed replaces the replica's own "
                "weights) to below 1 (it would be dropped)."
            )
        if self.keep_moves and (self.mixing > 0 or not self.overlap):
            raise PlanError(
                f"LocalSGD.keep_moves=True with overlap={self.overlap} and mixing={self.mixing}: what a replica moves "
                "by while a fragment travels is kept, so that has to take a step or more, and mixing does nothing. Set "
                "overlap to at least 1 (and below every), leave out mixing, or leave out keep_moves."
            )

    @property
    def streams(self) -> bool:
        """Whether what is agreed travels in parts, or while steps are taken, or leaves replicas with other weights."""
        return self.fragments > 1 or self.overlap > 0 or self.mixing > 0

    @property
    def sums(self) -> AllReduce:
        """How its sums travel."""
        return AllReduce(algorithm=self.algorithm, bucket_bytes=self.bucket_bytes)

    @property
    def num_round_steps(self) -> int:
        """After so many steps all replicas have the same weights."""
        return self.every


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Gossip(PlanPart):
    """Each replica takes steps by itself, and after every `every` of them mixes its weights with those of a few others.

    `peers="ring"`: the mean of itself and its two neighbors (D-PSGD; Lian et al. 2017). "random": the mean of pairs
    that are drawn anew each time. Every `average_every` steps, and before saves, all take the average of all
    (Gossip-PGA; Chen et al. 2021). `bucket_bytes` is for that sum, as in `AllReduce`. A worker sends its weights to one
    or two others each time. Raises PlanError for `every` below 1, and `average_every` below `every`.

    Example::

        plan = paceline.Plan(layout=paceline.Layout(replicas=8), sync=paceline.Gossip(peers="random", every=2))
        assert str(plan) == "replicas=8+gossip(peers=random,every=2)"
    """

    exact_with_fewer: ClassVar[bool] = False
    exact_again: ClassVar[bool] = False  # as under LocalSGD

    peers: Literal["ring", "random"] = "ring"
    every: int = 1
    average_every: int = 64
    bucket_bytes: int = 8 * MiB

    def __post_init__(self) -> None:
        check_fields(self)
        _require_bytes(self, self.bucket_bytes)
        if self.every < 1:
            raise PlanError(f"Gossip.every is {self.every}; it must be at least 1.")
        if self.average_every < self.every:
            raise PlanError(
                f"Gossip.average_every is {self.average_every}; it must be at least every={self.every} (the default is "
                "64)."
            )

    @property
    def sums(self) -> AllReduce:
        """How the sums of averages travel."""
        return AllReduce(bucket_bytes=self.bucket_bytes)

    @property
    def num_round_steps(self) -> int:
        """After so many steps all replicas have the same weights."""
        return self.average_every


Sync: TypeAlias = AllReduce | ParameterServer | LocalSGD | Gossip


def _require_bytes(part: PlanPart, bucket_bytes: int) -> None:
    if bucket_bytes < 1:
        raise PlanError(
            f"{type(part).__name__}.bucket_bytes is {bucket_bytes}; it must be at least 1 (the default is {8 * MiB})."
        )
