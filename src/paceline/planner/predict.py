"""Predict the seconds of a step, by part.

Blocks are priced one by one and added up. What runs on an accelerator is a matrix product (its rate), fused attention
(its rate), or moves memory (its bandwidth); collectives are priced by `collectives`. Then the step is put together: a
stage's micro-batches, the pipeline's idle time, what of the data-parallel communication is not hidden, the optimizer.

`Workload` holds all numbers that no constant changes, so that thousands of constants can be tried on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

from paceline.errors import PlanError
from paceline.planner.axes import Axes
from paceline.planner.cluster import Cluster
from paceline.planner.collectives import exchange_s, gather_s
from paceline.planner.constants import Constants
from paceline.planner.matmul import products
from paceline.planner.model_costs import Matmul, ModelCosts
from paceline.planner.software import Software

__all__ = ["PARTS", "Case", "Prediction", "Recompute", "Workload", "idle_slots"]

Recompute = Literal["none", "full", "half", "selective"]

PARTS = {
    "products": "matrix products of the blocks",
    "attention": "attention",
    "moves": "element-wise operations",
    "head": "the head over the vocabulary, and its loss",
    "recompute": "forward operations that are repeated in backward",
    "tensor": "exposed tensor-parallel communication",
    "context": "exposed context-parallel communication",
    "experts": "exposed exchange of tokens with experts",
    "sends": "exposed sends between stages",
    "idle": "the pipeline's bubble",
    "data": "exposed data-parallel communication",
    "optimizer": "the optimizer's step",
    "straggle": "waiting for the slowest host",
}

VALUE = 2  # bytes of a value in 16 bit
SCORE_PASSES = (
    13.0  # bytes of a score in an unfused attention's forward: product, scaled masked softmax, dropout, product
)
BACKWARD_MOVES = 1.7  # element-wise traffic of backward over that of forward
BACKWARD_SCORES = 1.6
# Fused attention computes scores again in backward: 2.5 times forward's operations. Kernels are measured in both
# directions together; forward reaches a higher rate than backward (FlashAttention-2, figs. 5 and 6).
FORWARD_ATTENTION, BACKWARD_ATTENTION = 0.85, 2.5 * 1.06
SMALL_HEADS, SMALL_HEAD_RATE = 80, 0.92  # head sizes below the first reach this share of the rate at 128
UNFUSED_RATE = 0.7  # of batched products of attention, over that of large ones
OFF_GRID_RATE = 0.5  # head sizes that are no multiple of 8: operands are not aligned to 16 bytes
OPTIMIZER_BYTES = 32.0  # per parameter: 12 bytes of state and master weights read and written, gradient, weight
HEAD_BYTES = 8.0  # per word of the vocabulary: logits in 16 bit and 32 bit, softmax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is predicted. `micro_batch` is in samples of one data-parallel worker, of which it runs `micro_batches`."""

    model: ModelCosts
    cluster: Cluster
    axes: Axes
    micro_batch: float
    micro_batches: float
    software: Software
    precision: Literal["bf16", "fp16", "fp8", "fp32"] = "bf16"
    recompute: Recompute = "none"

    def __post_init__(self) -> None:
        if self.micro_batch <= 0 or self.micro_batches < 1:
            raise PlanError(
                f"A worker runs {self.micro_batches:g} micro-batches of {self.micro_batch:g} samples; give at least 1 "
                "of more than 0."
            )

    @property
    def samples(self) -> float:
        """Samples of a step, of all workers."""
        return self.micro_batch * self.micro_batches * self.axes.data

    @property
    def tokens(self) -> float:
        return self.samples * self.model.sequence

    @property
    def micro_tokens(self) -> float:
        """Tokens of a micro-batch on one worker."""
        return self.micro_batch * self.model.sequence / self.axes.context

    @property
    def blocks(self) -> float:
        """Blocks of one stage, on average."""
        return self.model.block.count / self.axes.stages

    @property
    def has_short_ends(self) -> bool:
        """Whether the first and the last stage have a block less than the others, for the embedding and the head: how
        many blocks there are shows it."""
        count, stages = self.model.block.count, self.axes.stages
        return stages > 2 and count % stages != 0 and (count + 2) % stages == 0

    @property
    def held_parameters(self) -> float:
        """Parameters of the fullest worker, if nothing but tensor, experts and stages divides them."""
        block, axes = self.model.block, self.axes
        dense = block.parameters - block.expert_parameters
        each = dense / axes.tensor + block.expert_parameters / (axes.tensor * axes.experts)
        ends = self.model.vocabulary * self.model.hidden / axes.tensor
        return self.blocks * each + ends * (1 if axes.stages > 1 or self.model.tied else 2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds of a step, and of each of its `PARTS`."""

    step_s: float
    parts: Mapping[str, float]
    tokens_per_s: float
    mfu: float  # model-FLOPs utilisation of the peak in 16 bit, between 0 and 1


def idle_slots(axes: Axes) -> float:
    """Return for how many micro-batches' forward and backward each stage idles in a step, if all stages cost the same.

    (stages - 1) / chunks (Narayanan et al. 2021); a third of it where the weights' part of backward fills the rest, and
    forward and both parts of backward cost the same (ZB-H1 of Qi et al. 2023); nothing at twice the memory (ZB-2p).
    """
    slots = (axes.stages - 1) / axes.chunks
    return {"zero-bubble": slots / 3, "zero-bubble-2p": 0.0}.get(axes.schedule, slots)


@dataclasses.dataclass(frozen=True, slots=True)
class _BlockSeconds:
    """Seconds of one block for one micro-batch."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    repeated: float

    @property
    def forward_s(self) -> float:
        return sum(self.forward.values())

    @property
    def backward_s(self) -> float:
        return sum(self.backward.values()) + self.repeated


class Workload:
    """A case without constants; `predict` adds them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        axes, device, model = case.axes, case.cluster.device, case.model
        self._products = products(case.micro_tokens, model.block.matmuls, axes.tensor, device.units)
        head = Matmul(inputs=model.hidden, outputs=model.vocabulary, split="outputs")
        self._head = products(case.micro_tokens, (head,), axes.tensor, device.units)

    def predict(self, constants: Constants, factor: float = 1.0) -> Prediction:
        """Return the prediction; `factor` is measured over predicted seconds, of this software or of a receipt."""
        case, axes = self.case, self.case.axes
        block = self._block(constants)
        head_forward, head_backward = self._head_s(constants)
        count, micros = case.blocks, case.micro_batches
        parts = dict.fromkeys(PARTS, 0.0)
        for seconds in (block.forward, block.backward):
            for name, value in seconds.items():
                parts[name] += value * count * micros
        parts["recompute"] = block.repeated * count * micros
        head = head_forward + head_backward
        parts["head"] = head * micros
        stage = count * (block.forward_s + block.backward_s)
        slot = stage + head
        if axes.stages > 1:
            send = self._send_s(constants)
            if case.has_short_ends:  # the others have more blocks, and the last one the head
                slot = stage * (1 + 2 / case.model.block.count)
                parts["head"] = (slot - stage) * micros
            slot += send
            parts["sends"] = send * micros
            parts["idle"] = idle_slots(axes) * (stage + head / axes.stages + send)
        self._add_data(parts, constants, block, (head_forward, head_backward), slot)
        parts["optimizer"] = self._optimizer_s()
        total = sum(parts.values())
        parts["straggle"] = (
            total * constants.straggle * math.log2(max(1.0, axes.workers / case.cluster.devices_per_host))
        )
        total += parts["straggle"]
        flops = case.model.model_flops(case.tokens)
        step_s = total * factor
        return Prediction(
            step_s=step_s,
            parts={name: value * factor for name, value in parts.items()},
            tokens_per_s=case.tokens / step_s,
            mfu=flops / (step_s * axes.workers * case.cluster.device.peak["bf16"]),
        )

    # Compute.

    def _rate(self, precision: str, constants: Constants) -> float:
        """Operations per second of large products."""
        device = self.case.cluster.device
        heat = device.peak["bf16"] / device.watts / (312e12 / 400)
        share = constants.matmul * heat**-constants.throttle
        return device.peak_of(precision) * device.best_of(precision) * share

    def _passes(self, constants: Constants) -> float:
        return constants.passes * (constants.unfused if self.case.software.kernels == "single" else 1.0)

    def _block(self, constants: Constants) -> _BlockSeconds:
        case, axes, model = self.case, self.case.axes, self.case.model
        block, tokens, bandwidth = model.block, case.micro_tokens, case.cluster.device.memory_bandwidth
        rate = self._rate(case.precision, constants)
        forward_products, backward_products = self._products
        forward: dict[str, float] = {"products": forward_products.flops(constants.depth) / rate}
        backward: dict[str, float] = {"products": backward_products.flops(constants.depth) / rate}
        forward["attention"], backward["attention"] = self._attention(constants)

        spread = axes.tensor if axes.sequence else 1
        moved = tokens * (block.moved / spread + block.moved_split / axes.tensor) * VALUE / bandwidth
        quantised = 0.0
        if case.precision == "fp8":  # inputs of linear layers are read in 16 bit and written in 8, twice (transposed)
            inputs = sum(layer.rows * layer.inputs for layer in block.matmuls)
            quantised = tokens * inputs / axes.tensor * 2 * VALUE / bandwidth * constants.passes
        forward["moves"] = moved * self._passes(constants) + quantised
        backward["moves"] = moved * self._passes(constants) * BACKWARD_MOVES + quantised

        forward["tensor"] = backward["tensor"] = self._tensor_s(constants)
        forward["context"] = self._context_s(constants)
        backward["context"] = 2 * forward["context"]
        forward["experts"] = backward["experts"] = self._experts_s(constants)
        return _BlockSeconds(forward, backward, self._repeated(forward))

    def _attention(self, constants: Constants) -> tuple[float, float]:
        """Seconds of attention's forward and backward, of one block."""
        case, attention = self.case, self.case.model.block.attention
        if attention is None:
            return 0.0, 0.0
        device, tensor = case.cluster.device, case.axes.tensor
        flops = attention.flops(case.micro_tokens, case.model.sequence) / tensor
        if case.software.attention == "unfused":
            on_grid = 1.0 if attention.head_size % 8 == 0 else OFF_GRID_RATE
            dense = flops / (self._rate("bf16", constants) * UNFUSED_RATE * on_grid)
            scores = attention.heads / tensor * case.micro_tokens * case.model.sequence
            moved = scores * SCORE_PASSES / device.memory_bandwidth * self._passes(constants)
            return dense + moved, 2 * dense + BACKWARD_SCORES * moved
        rate = device.attention[case.software.attention] * constants.attention
        rate *= SMALL_HEAD_RATE if attention.head_size < SMALL_HEADS else 1.0
        needed = flops * (0.5 if attention.causal and case.software.skips_pairs else 1.0)
        return needed / rate * FORWARD_ATTENTION, needed / rate * BACKWARD_ATTENTION

    def _repeated(self, forward: Mapping[str, float]) -> float:
        """Seconds of what backward computes again, of one block."""
        case, whole = self.case, sum(forward.values())
        if case.recompute == "full":
            return whole
        if case.recompute == "half":  # every second block
            return whole / 2
        if case.recompute == "none":
            return 0.0
        if case.software.selective == "attention":
            return forward["attention"]
        return forward["products"] / 2 + forward["moves"]  # every second product's result is kept

    def _head_s(self, constants: Constants) -> tuple[float, float]:
        """Seconds of the head's forward and backward for one micro-batch."""
        case, rate = self.case, self._rate("bf16", constants)
        words = case.micro_tokens * case.model.vocabulary / case.axes.tensor
        moved = words * HEAD_BYTES / case.cluster.device.memory_bandwidth * max(1.0, self._passes(constants) / 2)
        forward, backward = self._head
        return forward.flops(constants.depth) / rate + moved, backward.flops(constants.depth) / rate + 2 * moved

    def _optimizer_s(self) -> float:
        case = self.case
        held = case.held_parameters / (self._data_members if case.axes.zero else 1)
        return held * OPTIMIZER_BYTES / case.cluster.device.memory_bandwidth

    # Communication.

    @property
    def _data_members(self) -> int:
        return self.case.axes.data * self.case.axes.context

    def _tensor_s(self, constants: Constants) -> float:
        """Two all-reduces of a micro-batch's activations, or with `sequence` as much in halves (Megatron-LM)."""
        case, tensor = self.case, self.case.axes.tensor
        if tensor == 1:
            return 0.0
        num_bytes = case.micro_tokens * case.model.hidden * VALUE
        inside = case.axes.inside(tensor, 1, case.cluster.devices_per_host)
        hidden = case.software.hides_tensor and case.axes.sequence
        return 4 * gather_s(num_bytes, tensor, inside, case.cluster, constants) * (constants.exposed if hidden else 1.0)

    def _context_s(self, constants: Constants) -> float:
        """Keys and values of all tokens, half of it behind attention."""
        case, axes, attention = self.case, self.case.axes, self.case.model.block.attention
        if axes.context == 1 or attention is None:
            return 0.0
        kv = 2 * attention.kv_heads * attention.head_size / axes.tensor
        num_bytes = case.micro_tokens * axes.context * kv * VALUE
        inside = axes.inside(axes.context, axes.tensor, case.cluster.devices_per_host)
        return gather_s(num_bytes, axes.context, inside, case.cluster, constants) / 2

    def _experts_s(self, constants: Constants) -> float:
        """Tokens to their experts and back."""
        case, axes, block = self.case, self.case.axes, self.case.model.block
        if axes.experts == 1:
            return 0.0
        num_bytes = case.micro_tokens * block.routed * case.model.hidden * VALUE / axes.tensor
        inside = axes.inside(axes.experts, axes.tensor * axes.context, case.cluster.devices_per_host)
        return 2 * exchange_s(num_bytes, axes.experts, inside, case.cluster, constants)

    def _send_s(self, constants: Constants) -> float:
        """Activations to the next stage and gradients back, for one micro-batch, through all chunks."""
        case, axes = self.case, self.case.axes
        if case.software.hides_sends and axes.chunks > 1:
            return 2 * axes.chunks * constants.latency
        num_bytes = case.micro_tokens * case.model.hidden * VALUE / axes.tensor
        if axes.workers > case.cluster.devices_per_host:
            seconds = num_bytes * case.cluster.devices_per_host / (case.cluster.network * constants.network)
        else:
            seconds = num_bytes / (case.cluster.device.link * constants.link)
        return 2 * axes.chunks * (seconds + constants.latency)

    def _add_data(
        self,
        parts: dict[str, float],
        constants: Constants,
        block: _BlockSeconds,
        head: tuple[float, float],
        slot: float,
    ) -> None:
        """Gradients are summed behind the last micro-batch; ZeRO-3 gathers parameters behind every one."""
        case, axes = self.case, self.case.axes
        members = self._data_members
        if members == 1:
            return
        inside = axes.inside(members, axes.tensor, case.cluster.devices_per_host)
        num_bytes, q = case.held_parameters * VALUE, constants.overlap

        def together(first: float, second: float) -> float:
            return (first**q + second**q) ** (1 / q)

        if axes.zero == 3:
            units = max(1.0, case.blocks)
            gather = units * gather_s(num_bytes / units, members, inside, case.cluster, constants)
            forward = case.blocks * block.forward_s + head[0]
            backward = case.blocks * block.backward_s + head[1]
            exposed = together(forward, gather) - forward + together(backward, 2 * gather) - backward
            parts["data"] = exposed * case.micro_batches
        else:
            both = 2 * gather_s(num_bytes, members, inside, case.cluster, constants)
            parts["data"] = together(slot, both) - slot
