"""Predict the bytes of the fullest worker, by part.

State: weights, gradients, and Adam's state with master weights, as mixed precision keeps them (Rajbhandari et al.,
"ZeRO", 2020: 2 + 2 + 12 bytes per parameter). Kept values: what forward leaves for backward, of as many micro-batches
as are in flight (Korthikanti et al., "Reducing Activation Recomputation", 2022). Working space: the block that is being
computed again, gathered parameters, logits. On top comes what the device's runtime and the collectives' buffers take,
and the gaps that an allocator leaves.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Literal

from paceline.plan import AllReduce, Gossip, LocalSGD, ParameterServer, Sync
from paceline.planner.case import VALUE, Case, Recompute
from paceline.planner.model_costs import ADAM_BYTES, Block
from paceline.planner.offloading import PIECES, offloading_of, optimizer_bytes
from paceline.planner.wire_costs import FEEDBACK_BYTES

__all__ = [
    "MEMORY_PARTS",
    "VERDICTS",
    "MemoryPrediction",
    "Verdict",
    "in_flight",
    "predict_memory",
    "state_bytes",
    "verdict",
]

MEMORY_PARTS = {
    "state": "weights, gradients, and the optimizer's state",
    "agreement": "what sync and wire keep: error feedback, agreed weights, momentum",
    "kept": "what forward keeps for backward",
    "working": "the block that is computed again, and gathered parameters",
    "logits": "the head's results, and their gradients",
    "runtime": "the device's runtime and the collectives' buffers",
    "gaps": "what the allocator has reserved and not given out",
}

Verdict = Literal["fits", "does not fit", "unsure"]
VERDICTS: tuple[Verdict, ...] = ("fits", "unsure", "does not fit")  # the better ones first

WEIGHT, MASTER = 2.0, 4.0  # bytes per parameter
COPY = 4.0  # bytes of a weight or gradient in a copy of them
GAPS = 0.1
LOGIT_BYTES = 2.0 + 4.0 + 4.0  # in 16 bit, in 32 bit for the loss, and their gradient
# Kept per score by unfused attention: softmax; with dropout also its mask and result.
SCORE_BYTES, MASKED_SCORE_BYTES = 2.0, 5.0
QUERY_STATISTICS = 4.0  # bytes per token and head that fused attention keeps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPrediction:
    """Bytes of the fullest worker, and of each of its `MEMORY_PARTS`; `elsewhere`: on its host, or on disk."""

    peak: float
    parts: Mapping[str, float]
    elsewhere: float = 0.0


def in_flight(case: Case) -> float:
    """Return of how many micro-batches the first stage keeps values at once, in whole stages.

    1f1b keeps as many as there are stages (or micro-batches); interleaving (stages - 1) / (stages x chunks) more; gpipe
    all; a zero bubble by ZB-2p twice as many, less one.
    """
    axes, micros = case.axes, case.micro_batches
    if axes.stages == 1:
        return 1.0
    if axes.schedule == "gpipe":
        return micros
    if axes.schedule == "zero-bubble-2p":
        return min(micros, 2.0 * axes.stages - 1)
    more = 1 + (axes.stages - 1) / (axes.stages * axes.chunks) if axes.chunks > 1 else 1.0
    return min(micros, axes.stages) * more


def state_bytes(
    parameters: float,
    *,
    zero: int,
    members: int,
    weight_bytes: float = 2.0,
    gradient_bytes: float = 2.0,
    copied_bytes: float = 0.0,
    keeps_gathered: bool = False,
    frozen: float = 0.0,
    optimizer_bytes: float = ADAM_BYTES,
) -> float:
    """Return the bytes of weights, gradients and optimizer of so many parameters, of which `members` workers split what
    `zero` says. `frozen` ones of them are weights alone.

    `weight_bytes` and `gradient_bytes`: of those that are not split; weights of 4 bytes are their own master weights.
    `copied_bytes`: of a copy of the gradients that are split. `keeps_gathered`: ZeRO-3 whose parameters and gradients
    stay whole within a step.
    """
    trained = parameters - frozen
    if zero == 0 or members == 1:
        masters = 0.0 if weight_bytes > WEIGHT else MASTER
        return frozen * weight_bytes + trained * (weight_bytes + gradient_bytes + masters + optimizer_bytes)
    state = MASTER + optimizer_bytes
    if zero == 1:
        return parameters * weight_bytes + trained * (gradient_bytes + (state + copied_bytes) / members)
    if zero == 2:
        return parameters * weight_bytes + trained * (WEIGHT + state) / members
    whole = parameters * weight_bytes + trained * gradient_bytes if keeps_gathered else 0.0
    return (frozen * weight_bytes + trained * (2 * WEIGHT + state)) / members + whole


def predict_memory(case: Case, factor: float = 1.0, *, state: float | None = None) -> MemoryPrediction:
    """Return the fullest worker's bytes; `factor` is measured over predicted. `state`: where it is known exactly."""
    axes, software, model = case.axes, case.software, case.model
    group = axes.shard * axes.context
    parts = dict.fromkeys(MEMORY_PARTS, 0.0)
    parts["state"] = state or _state(case)
    parts["agreement"] = _agreement_bytes(case)
    kept, largest = 0.0, 0.0
    for block in model.blocks:
        each, working = _block_bytes(case, block, case.recompute)
        kept, largest = kept + block.count * each, max(largest, working)
    blocks = model.count / axes.stages  # of the first stage
    blocks = blocks - 1 + 2 / axes.stages if case.has_short_ends else blocks * case.unevenness
    parts["kept"] = in_flight(case) * kept / model.count * blocks
    parts["working"] = largest
    if model.rest is not None:  # near the loss, values are in 32 bit, too, and have gradients of their size
        parts["logits"] = sum(_block_bytes(case, model.rest, "none")) / case.value_bytes * LOGIT_BYTES
    if case.offload == "optimizer" and state is None:
        parts["working"] += min(PIECES, optimizer_bytes(case))
    if state is None and ((axes.zero == 3 and group > 1) or case.offload == "all"):
        ends = model.rest.parameters if model.rest is not None else model.vocabulary * model.hidden
        unit = max(ends, *(block.parameters - block.expert_parameters for block in model.blocks))
        parts["working"] += software.gathered_units * unit / axes.tensor * software.weight_bytes
    if axes.stages == 1:
        parts["logits"] += case.micro_tokens * model.vocabulary / axes.tensor * LOGIT_BYTES
    parts["gaps"] = sum(parts.values()) * GAPS
    parts["runtime"] = case.cluster.device.runtime
    if case.offload == "all":  # it is prepared whole on the device
        parts["working"] += max(0.0, COPY * case.held_parameters + parts["runtime"] - sum(parts.values()))
    parts = {name: value * factor for name, value in parts.items()}
    return MemoryPrediction(peak=sum(parts.values()), parts=parts, elsewhere=offloading_of(case).elsewhere)


def _state(case: Case) -> float:
    """Bytes of weights, gradients and Adam on the device; what is offloaded, or on servers, is not there."""
    axes, software = case.axes, case.software
    if case.offload == "all":
        return 0.0
    group = axes.shard * axes.context  # rows of experts are split among these, all others also among `experts`
    # With weights of 16 bits gradients have them, too, and are copied; of weights of 32 bits they have as many.
    is_half = case.precision == "fp16" and software.weight_bytes == WEIGHT
    found = sum(
        state_bytes(
            held,
            zero=axes.zero,
            members=members,
            weight_bytes=software.weight_bytes,
            gradient_bytes=VALUE if is_half else software.gradient_bytes,
            copied_bytes=VALUE if is_half else 0.0,  # gradients in 32 bit, less those in 16 bit
            keeps_gathered=software.keeps_gathered and axes.stages > 1,
            frozen=frozen,
            optimizer_bytes=case.state_bytes,
        )
        for held, frozen, members in (
            (case.held_dense, case.frozen_dense, group * axes.experts),
            (case.held_experts, case.frozen_experts, group),
        )
    )
    is_elsewhere = case.offload == "optimizer" or isinstance(case.sync, ParameterServer)
    return found - optimizer_bytes(case) if is_elsewhere else found


def _agreement_bytes(case: Case) -> float:
    """Bytes of what outlives a step, or is made for an exchange, beside the gradients."""
    each = AGREED[type(case.sync)](case.sync, case.axes.replicas)
    if case.wire is not None and case.wire.feedback and case.axes.data * case.axes.context > 1:
        each += FEEDBACK_BYTES
    return each * case.trained_split


def _summed(sync: Sync, replicas: int) -> float:
    """Adasum holds all replicas' gradients of its share, and one more copy."""
    is_adasum = isinstance(sync, AllReduce) and sync.op == "adasum" and replicas > 1
    return COPY * (1 + 1 / replicas) if is_adasum else 0.0


def _averaged(sync: Sync, _: int) -> float:
    """The agreed weights, the move that is sent, the outer momentum, and weights when they were sent."""
    if not isinstance(sync, LocalSGD):
        return 0.0
    return COPY * (2 + (sync.outer is not None) + (sync.keep_moves / sync.fragments))


def _mixed(sync: Sync, replicas: int) -> float:
    """The agreed weights, and while weights are mixed those of each peer, the own ones, and the mix."""
    peers = min(replicas - 1, 2 if isinstance(sync, Gossip) and sync.peers == "ring" else 1)
    return COPY * (3 + peers)


AGREED: Mapping[type[Sync], Callable[[Sync, int], float]] = {
    AllReduce: _summed,
    LocalSGD: _averaged,
    Gossip: _mixed,
    ParameterServer: lambda *_: COPY,  # gradients, while they are pushed
}


def _block_bytes(case: Case, block: Block, recompute: Recompute) -> tuple[float, float]:
    """Return what one block keeps of a micro-batch, and the most that backward needs beside it."""
    axes, tokens = case.axes, case.micro_tokens
    spread, width = (axes.tensor if axes.sequence else 1), axes.tensor
    scores = 0.0
    if block.attention is not None:
        heads = block.attention.heads / width
        if case.software.attention == "unfused":
            each = MASKED_SCORE_BYTES if case.software.dropout else SCORE_BYTES
            scores = each * heads * tokens * block.attention.span
        else:
            scores = QUERY_STATISTICS * heads * tokens
    if not block.needs_backward:
        return 0.0, 0.0
    wide = case.value_bytes / VALUE
    again = tokens * (block.working / spread + block.working_split / width) * wide  # regions of the model itself
    whole = (tokens * (block.kept / spread + block.kept_split / width) + scores) * wide
    entry = case.value_bytes * tokens * block.hidden / spread  # the block's input
    if recompute == "none":
        return whole, again
    if recompute == "full":
        return entry, whole + again
    if recompute == "half":
        return (entry + whole) / 2, whole + again
    if case.software.selective == "attention":
        return whole - scores, scores + again
    # The block's input, attention's result, and every second product's; norms and activation functions come again.
    results = sum(layer.rows * layer.outputs for layer in block.matmuls)
    return entry + tokens * case.value_bytes / width * (block.hidden + results / 2), whole + again


def verdict(case: Case, prediction: MemoryPrediction, *, half_width: float) -> Verdict:
    """Say whether a case fits its device, and what is offloaded its host: "unsure" where the memory that is there lies
    within the prediction's band.

    `half_width`: of the 80 % band, of the logarithm. "fits" asks for twice that: to be wrong with it costs a run.
    """
    found = _verdict(prediction.peak, case.cluster.device.memory, half_width)
    if case.on_disk or case.cluster.device.is_synchronous:
        return found
    on_host = _verdict(prediction.elsewhere * case.on_host, case.cluster.host_memory, half_width)
    return VERDICTS[max(VERDICTS.index(found), VERDICTS.index(on_host))]


def _verdict(num_bytes: float, memory: float, half_width: float) -> Verdict:
    if num_bytes * math.exp(2 * half_width) <= memory:
        return "fits"
    return "does not fit" if num_bytes * math.exp(-half_width) > memory else "unsure"
