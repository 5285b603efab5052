"""Layout says how many copies of the model there are, and how one copy is spread over workers."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paceline.config import check_fields
from paceline.errors import PlanError
from paceline.plan.part import PlanPart

__all__ = ["Layout"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, repr=False)
class Layout(PlanPart):
    """`replicas` copies of the model, each over the product of the other axes' workers; None: as many as there are.

    A pair (least, most) makes the run elastic: replicas may be lost, join and leave while it goes on.

    `shard` workers split one replica's state by rows (ZeRO, Rajbhandari et al. 2020, by torch's `fully_shard`), and
    share its micro-batches. `zero` says what stays whole on each of them, with DeepSpeed's numbers. With P bytes of
    parameters, G of gradients, O of optimizer state (Adam: O = 2 P) over s workers, and U bytes of the largest unit (a
    repeated block; what is in no block is one more), one of them holds besides activations

        zero    between steps    at most, in a step            parameters are gathered    gradients are summed
        1       (P + O) / s      (P + O) / s + P + G           once a step                once a step
        2       (P + O) / s      (P + G + O) / s + P + ~2 U    once a step                after each micro-batch
        3       (P + O) / s      (P + G + O) / s + ~3 U        twice a micro-batch        after each micro-batch

    DeepSpeed's 1 and 2 keep the whole parameters between steps, too; here they go with a step's last backward.

    `tensor` parallel workers split the layers themselves (Shoeybi et al., "Megatron-LM", 2019): each has its heads of
    every attention, its features of every MLP and its words of the vocabulary, and all of them run the same
    micro-batches together. Of P, G and O bytes in these layers, one worker holds 1 / tensor; other layers it holds
    whole. Partial results are summed over them twice a block and forward, and twice in backward. With `sequence` tokens
    are split between those layers, so that norms, dropout and what they keep for backward are shared out as well.

    `stages` workers hold the model's units one after the other, and pass on what each micro-batch becomes in them (a
    pipeline: Huang et al., "GPipe", 2019). One holds about 1 / stages of P, G and O, and all of them run the same
    micro-batches. `schedule` says in which order, see `paceline.schedule.pipeline`: with m micro-batches, workers idle
    for (stages - 1) / (m + stages - 1) of a step under "gpipe" and "1f1b", and for less under "zero-bubble", or under
    "interleaved" with `stages_per_worker` of 2 or more, where each worker holds several shorter stages.

    `context` workers share each sequence: one holds the whole model and 1 / context of the tokens, and so of what is
    kept for backward. Attention sees all tokens, by an all-to-all between tokens and heads (Jacobs et al., "DeepSpeed
    Ulysses", 2023), or, where heads do not divide, with keys and values going round a ring (Liu et al., 2023).

    `experts` workers hold 1 / experts of the experts of each routed block, and all else whole; each has micro-batches
    of its own, and its tokens travel to their experts and back (Lepikhin et al., "GShard", 2020): twice in a block's
    forward, and twice in its backward. No token is dropped. Beside `shard`, rows of all else are split over shard x
    experts workers, and those of an expert over shard.
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
            raise PlanError(f"Layout.tensor is {self.tensor}; it must be at least 1: no layer is cut.")
        if self.sequence and self.tensor == 1:
            raise PlanError(
                "Layout.sequence is True, but tensor=1 cuts nothing: use Layout(tensor=n, sequence=True), or leave "
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
            raise PlanError(f"Layout.stages is {self.stages}; it must be at least 1: the model is not cut.")
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
