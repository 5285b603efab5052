"""Layout: how many replicas of the model there are (data parallel), and how workers split one replica."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import PlanPart

__all__ = ["Layout"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Layout(PlanPart):
    """How many `replicas` of the model there are, and how many workers split each one.

    One replica has the product of the other axes' workers.

    `replicas=None`: as many as there are workers for. A pair (least, most) makes the run elastic: replicas may be lost,
    join and leave. Replicas exchange gradients or weights, as `Plan.sync` says (data parallel).

    `shard` (fully sharded, ZeRO; Rajbhandari et al. 2020, by torch's `fully_shard`): workers split one replica's state
    by rows and split its micro-batches. `zero` is DeepSpeed's number of what is split. Take P bytes of parameters, G of
    gradients, O of optimizer state (Adam: O = 2 P), s workers, and U bytes of the largest unit. A unit is a repeated
    block; what is in no block is one more. Besides activations one worker holds::

        zero    between steps    at most, in a step            parameters are gathered    gradients are summed
        1       (P + O) / s      (P + O) / s + P + G           once a step                once a step
        2       (P + O) / s      (P + G + O) / s + P + ~2 U    once a step                after each micro-batch
        3       (P + O) / s      (P + G + O) / s + ~3 U        twice a micro-batch        after each micro-batch

    DeepSpeed's 1 and 2 keep the whole parameters between steps, too; here they are freed with a step's last backward.

    `tensor` (tensor parallel; Shoeybi et al., "Megatron-LM", 2019): workers split the layers themselves. Each has its
    heads of every attention, its features of every MLP and its words of the vocabulary. All of them run the same
    micro-batches together. One worker holds 1 / tensor of these layers' P, G and O, and other layers whole. Partial
    results are all-reduced among them twice a block in forward, and twice in backward. `sequence` also splits tokens
    between those layers: norms, dropout, and what they keep for backward.

    `stages` (pipeline parallel; Huang et al., "GPipe", 2019): workers hold the model's units one after the other, and
    send each micro-batch's activations to the next stage. One holds about 1 / stages of P, G and O. All of them run the
    same micro-batches, in the order of `schedule` (see `paceline.schedule.pipeline`). With m micro-batches, workers
    idle for (stages - 1) / (m + stages - 1) of a step under "gpipe" and "1f1b". They idle less under "zero-bubble".
    They also idle less under "interleaved" with `stages_per_worker` of 2 or more, where each worker holds several
    shorter stages.

    `context` (context parallel): workers split each sequence. One holds the whole model and 1 / context of the tokens,
    and so of what is kept for backward. Attention sees all tokens, by an all-to-all between tokens and heads (Jacobs et
    al., "DeepSpeed Ulysses", 2023). If heads do not divide, keys and values pass around a ring (Liu et al., 2023).

    `experts` (expert parallel): workers hold 1 / experts of the experts of each routed block, and all else whole. Each
    has its own micro-batches. Tokens travel to their experts and back by all-to-all (Lepikhin et al., "GShard", 2020),
    twice in a block's forward and twice in its backward. No token is dropped. With `shard`, rows of an expert are split
    over shard workers, and rows of all else over shard x experts workers.

    Raises PlanError for numbers below 1, and for `zero`, `sequence`, `schedule` or `stages_per_worker` without effect.

    Example::

        layout = paceline.Layout(replicas=2, tensor=4)
        assert layout.workers_each == 4 and layout.workers == 8
    """

    replicas: int | tuple[int, ...] | None = None
    shard: int = 1
    zero: Literal[1, 2, 3] = 3
    tensor: int = 1
    sequence: bool = False
    stages: int = 1
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero-bubble"] = "1f1b"
    stages_per_worker: int = 1
    context: int = 1
    experts: int = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.replicas, tuple):
            if len(self.replicas) != 2 or not 1 <= self.replicas[0] <= self.replicas[1]:
                raise PlanError(
                    f"Layout.replicas is {self.replicas}; a pair is (least, most), such as (2, 8), least at least 1."
                )
        elif self.replicas is not None and self.replicas < 1:
            raise PlanError(
                f"Layout.replicas is {self.replicas}; it must be at least 1, or None: as many as the job has workers."
            )
        if self.shard < 1:
            raise PlanError(f"Layout.shard is {self.shard}; it must be at least 1: every worker holds the whole model.")
        if self.shard == 1 and self.zero != 3:
            raise PlanError(
                f"Layout.zero is {self.zero}, but shard=1 splits nothing: use Layout(shard=n, zero={self.zero}), or "
                "leave zero out."
            )
        if self.tensor < 1:
            raise PlanError(f"Layout.tensor is {self.tensor}; it must be at least 1: no layer is split.")
        if self.sequence and self.tensor == 1:
            raise PlanError(
                "Layout.sequence is True, but tensor=1 splits nothing: use Layout(tensor=n, sequence=True), or leave "
                "sequence out."
            )
        self._check_stages()
        if self.context < 1:
            raise PlanError(
                f"Layout.context is {self.context}; it must be at least 1: each worker has whole sequences."
            )
        if self.experts < 1:
            raise PlanError(
                f"Layout.experts is {self.experts}; it must be at least 1: each worker has all experts of a block."
            )

    def _check_stages(self) -> None:
        if self.stages < 1:
            raise PlanError(f"Layout.stages is {self.stages}; it must be at least 1: the model is one stage.")
        if self.stages_per_worker < 1:
            raise PlanError(f"Layout.stages_per_worker is {self.stages_per_worker}; it must be at least 1.")
        if self.stages == 1 and (self.schedule != "1f1b" or self.stages_per_worker > 1):
            raise PlanError(
                f"Layout(schedule={self.schedule!r}, stages_per_worker={self.stages_per_worker}), but stages=1 makes "
                "no pipeline: use Layout(stages=n, ...), or leave them out."
            )
        if self.stages_per_worker > 1 and self.schedule != "interleaved":
            raise PlanError(
                f"Layout.stages_per_worker is {self.stages_per_worker}, but schedule={self.schedule!r} has one stage "
                "on each worker: use schedule='interleaved', or leave stages_per_worker out."
            )

    @property
    def is_elastic(self) -> bool:
        """Whether the number of replicas may change during a run."""
        return isinstance(self.replicas, tuple)

    @property
    def workers(self) -> int | None:
        """Workers that this layout begins with, unless the job says otherwise; None when it takes any number."""
        most = self.replicas[1] if isinstance(self.replicas, tuple) else self.replicas
        return None if most is None else most * self.workers_each

    @property
    def workers_each(self) -> int:
        """Workers of one replica."""
        return self.shard * self.experts * self.stages * self.context * self.tensor

    def takes(self, workers: int) -> bool:
        """Whether a run of this layout may begin with so many workers."""
        replicas, rest = divmod(workers, self.workers_each)
        if rest or not replicas:
            return False
        if isinstance(self.replicas, tuple):
            return self.replicas[0] <= replicas <= self.replicas[1]
        return self.replicas in (None, replicas)
