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
    """Every replica gets the weighted mean of all gradients, in buckets that travel while backward still runs.

    `bucket_bytes` counts gradients as they are in memory, before the wire shrinks them. `algorithm` says how a bucket
    is summed: in a "ring", over two trees ("tree"), by recursive "halving", or "hierarchical": inside each host first.
    "auto" sums in memory where all workers are on one host, and else takes what it has measured to be the fastest.
    `op="adasum"` combines the replicas' own gradients in place of adding them up: what they have in common counts once,
    what they have not adds up.
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
    """Parameters and optimizer live on `servers` processes; replicas send them gradients, and get weights.

    `staleness` says how many updates the weights may have had, at most, between those that a gradient was computed on
    and those that it is applied to. 0: all replicas share each batch, and every step is one update, as with AllReduce.
    s: each replica takes a whole batch at a time, and each is one update. None: the same, without a bound.
    Under all of these replicas may come and go, with `Layout(replicas=(least, most))`; with `drop` they may not.
    `drop=n` has n backup workers (Chen et al. 2016): an update is made of the shares of a batch that come first, of all
    replicas but n. What the slowest n have computed is thrown away, and nobody waits for them.
    `bucket_bytes` counts the gradients that travel together while backward still runs. With `mirrored` each server has
    a second process beside it, which holds and does the same, and takes its place where it is lost: no step is. The
    price: the servers' memory and the optimizer's work twice, and each step's sums once more over the network.

    Parameters are whole on one server each, but for the tables of embeddings with `sparse=True`: of these every server
    has rows, and only those move that a step touches.
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
        """Where replicas do not wait for all, losses depend on who was fast, undisturbed as well."""
        return self.staleness == 0 and not self.drop

    @property
    def exact_again(self) -> bool:
        """As `exact_with_fewer`."""
        return self.exact_with_fewer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Nesterov(PlanPart):
    """An outer optimizer for `LocalSGD`: SGD with Nesterov's momentum, on how far the replicas have moved on average.

    DiLoCo (Douillard et al. 2023) is `LocalSGD(every=500, outer=Nesterov(lr=0.7, momentum=0.9))`. With lr=1 and
    momentum=0 the weights become the average of the replicas', as without an outer optimizer.
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
    """Each replica takes `every` steps by itself, on its share of each global batch; then they agree on weights.

    They become the average of the replicas' weights (McMahan et al. 2017, Stich 2019), weighted by the samples that
    each has used, or what an `outer` optimizer makes of it. Nothing travels between replicas before that.

    Streaming (Douillard et al. 2025): with `fragments=n` the parameters are divided into n parts of about the same
    size, each with a place of its own within the `every` steps; what is agreed about one travels while the next
    `overlap` steps are taken, and when it lands the share `mixing` of the replica's own weights stays. With
    `keep_moves` it is what the replica has moved by since then that stays, in full, on top of what was agreed (Shen et
    al. 2019): no step is lost to an overlap, however long. That takes 4 more bytes for each fp32 parameter under way.

    `algorithm` and `bucket_bytes` say how the sums travel, as in `AllReduce`.
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
    """Each replica takes steps by itself, and every `every` of them mixes its weights with those of a few others.

    `peers="ring"`: the mean of itself and its two neighbours; "random": of pairs that are drawn anew each time. Every
    `average_every` steps all take the average of all; where that is needed, earlier. `bucket_bytes` says how that sum
    travels, as in `AllReduce`.
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
