"""Predict the seconds of a step, by part.

Blocks are priced one by one and added up. What runs on an accelerator is a matrix product (its rate), fused attention
(its rate), or moves memory (its bandwidth); collectives are priced by `collectives`. Then the step is put together: a
stage's micro-batches, the pipeline's idle time, what of the data-parallel communication is not hidden, the optimizer.

`Workload` holds all numbers that no constant changes, so that thousands of constants can be tried on it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

from paceline.planner.case import VALUE, Case, Recompute
from paceline.planner.collectives import exchange_s, gather_s, latency_s
from paceline.planner.constants import Constants
from paceline.planner.data_parallel import Passes, data_parallel_s, served_apart
from paceline.planner.idle_slots import idle_slots
from paceline.planner.matmul import Products, products
from paceline.planner.model_costs import Block, Matmul
from paceline.planner.sync_waits import sync_waits_s

__all__ = ["PARTS", "Prediction", "Workload"]

PARTS = {
    "products": "matrix products of the blocks",
    "attention": "attention",
    "moves": "element-wise operations",
    "launches": "waiting for the host, which launches kernels more slowly than they run",
    "head": "the head over the vocabulary, and its loss",
    "recompute": "forward operations that are repeated in backward",
    "tensor": "exposed tensor-parallel communication",
    "context": "exposed context-parallel communication",
    "experts": "exposed exchange of tokens with experts",
    "sends": "exposed sends between stages",
    "idle": "the pipeline's bubble",
    "data": "exposed data-parallel communication",
    "packing": "packing and unpacking what shards gather and sum",
    "coding": "coding what replicas send, and mixing it with what they have",
    "offload": "moving what is offloaded to the device and back",
    "optimizer": "the optimizer's step",
    "straggle": "waiting for the slowest host, and on shared processors for each other",
    "other": "what was measured beside all these",
}

COMPUTED = ("products", "attention", "moves", "launches", "head", "recompute")

SCORE_PASSES = 8.0  # bytes of a score in an unfused attention's forward: written, softmax's two, read
BACKWARD_MOVES = 1.7  # element-wise traffic of backward over that of forward
BACKWARD_SCORES = 1.6
# Fused attention computes scores again in backward: 2.5 times forward's operations. Kernels are measured in both
# directions together; forward reaches a higher rate than backward (FlashAttention-2, figs. 5 and 6).
FORWARD_ATTENTION, BACKWARD_ATTENTION = 0.85, 2.5 * 1.06
SMALL_HEADS, SMALL_HEAD_RATE = 80, 0.92  # head sizes below the first reach this share of the rate at 128
UNFUSED_RATE = 0.7  # of batched products of attention, over that of large ones
OFF_GRID_RATE = 0.5  # head sizes that are no multiple of 8: operands are not aligned to 16 bytes
HEAD_BYTES = 8.0  # per word of the vocabulary: logits in 16 bit and 32 bit, softmax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds of a step, and of each of its `PARTS`."""

    step_s: float
    parts: Mapping[str, float]
    tokens_per_s: float
    mfu: float  # model-FLOPs utilisation of the peak in 16 bit, between 0 and 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Seconds:
    """Seconds of a micro-batch through some blocks: of their parts, and of what backward repeats."""

    forward: Mapping[str, float]
    backward: Mapping[str, float]
    repeated: float

    @property
    def forward_s(self) -> float:
        return sum(self.forward.values())

    @property
    def backward_s(self) -> float:
        return sum(self.backward.values()) + self.repeated

    @property
    def all_s(self) -> float:
        return self.forward_s + self.backward_s


class Workload:
    """A case without constants; `predict` adds them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        axes, device, model = case.axes, case.cluster.device, case.model
        units = 0 if device.is_synchronous else device.units  # a CPU has caches in place of tiles
        self._products = [
            products(case.micro_tokens, block.matmuls, axes.tensor, units, axes.experts) for block in model.blocks
        ]
        self._rest: tuple[Products, Products] | None = None
        if model.rest is not None:
            self._rest = products(case.micro_tokens, model.rest.matmuls, axes.tensor, units)
        head = (Matmul(inputs=model.hidden, outputs=model.vocabulary, split="outputs"),) if model.vocabulary else ()
        self._head = products(case.micro_tokens, head, axes.tensor, units)

    def predict(self, constants: Constants, factor: float = 1.0) -> Prediction:
        """Return the prediction; `factor` is measured over predicted seconds, of this software or of a receipt."""
        case, axes = self.case, self.case.axes
        stage, head = self._stage(constants), self._head_s(constants)
        micros = case.micro_batches
        parts = dict.fromkeys(PARTS, 0.0)
        for seconds in (stage.forward, stage.backward):
            for name, value in seconds.items():
                parts[name] += value * micros
        parts["recompute"] = stage.repeated * micros
        parts["head"] = sum(head) * micros
        slot = stage.all_s + sum(head)
        if axes.stages > 1:
            send = self._send_s(constants)
            if case.has_short_ends:  # the others have more blocks, and the last one the head
                slot = stage.all_s * (1 + 2 / case.model.count)
                parts["head"] = (slot - stage.all_s) * micros
            uneven = 0.0 if case.has_short_ends else stage.all_s * (case.unevenness - 1)
            slot += send + uneven
            parts["sends"] = send * micros
            parts["idle"] = idle_slots(axes, micros) * (stage.all_s + sum(head) / axes.stages + send) + uneven * micros
        passes = Passes(forward_s=stage.forward_s + head[0], backward_s=stage.backward_s + head[1], slot_s=slot)
        parts |= data_parallel_s(case, constants, passes)
        total = sum(parts.values())
        hosts = max(1.0, axes.workers / case.cluster.devices_per_host)
        parts["straggle"] = total * constants.straggle * math.log2(hosts)
        parts["straggle"] += sync_waits_s(case, sum(parts[name] for name in COMPUTED))
        if case.at_once > 1:
            parts = served_apart(case, constants, parts)
        step_s = sum(parts.values()) * factor
        flops = case.model.model_flops(case.tokens)
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

    def _stage(self, constants: Constants) -> _Seconds:
        """A micro-batch through the blocks of one stage, on average."""
        forward: dict[str, float] = {}
        backward: dict[str, float] = {}
        repeated = 0.0
        for block, work in zip(self.case.model.blocks, self._products, strict=True):
            one, share = self._block(block, work, constants, self.case.recompute), block.count / self.case.axes.stages
            for total, seconds in ((forward, one.forward), (backward, one.backward)):
                for name, value in seconds.items():
                    total[name] = total.get(name, 0.0) + value * share
            repeated += one.repeated * share
        return _Seconds(forward, backward, repeated)

    def _block(
        self, block: Block, work: tuple[Products, Products], constants: Constants, recompute: Recompute
    ) -> _Seconds:
        case, axes = self.case, self.case.axes
        tokens, bandwidth = case.micro_tokens, case.cluster.device.memory_bandwidth
        rate = self._rate(case.precision, constants)
        forward: dict[str, float] = {"products": work[0].flops(constants.depth) / rate}
        backward: dict[str, float] = {"products": work[1].flops(constants.depth) / rate}
        if case.cluster.device.is_synchronous:  # weights come from memory: read, in backward read twice and written
            forward["products"] += self._weight_elements(block, lambda _: 1) * case.value_bytes / bandwidth
            backward["products"] += (
                self._weight_elements(block, lambda layer: layer.needs_inputs + 2 * layer.needs_weights)
                * case.value_bytes
                / bandwidth
            )
        forward["attention"], backward["attention"] = self._attention(block, constants)

        spread = axes.tensor if axes.sequence else 1
        moved = self._moved(block, spread, constants) * tokens * case.value_bytes / bandwidth
        quantised = 0.0
        if case.precision == "fp8":  # inputs of linear layers are read in 16 bit and written in 8, twice (transposed)
            inputs = sum(layer.rows * layer.inputs for layer in block.matmuls)
            quantised = tokens * inputs / axes.tensor * 2 * VALUE / bandwidth * constants.passes
        forward["moves"] = moved + quantised
        backward["moves"] = (moved * BACKWARD_MOVES + quantised) * block.followed

        forward["tensor"] = backward["tensor"] = self._tensor_s(block, constants)
        forward["context"] = self._context_s(block, constants)
        backward["context"] = 2 * forward["context"]
        forward["experts"] = backward["experts"] = self._experts_s(block, constants)
        if case.software.kernels == "single":
            forward["launches"] = self._launches_s(block.launches, sum(forward.values()))
            backward["launches"] = self._launches_s(2 * block.launches * block.followed, sum(backward.values()))
        if not block.needs_backward:
            return _Seconds(forward, dict.fromkeys(backward, 0.0), 0.0)
        own = sum(forward.values()) * block.again
        return _Seconds(forward, backward, self._repeated(forward, recompute) + own)

    def _weight_elements(self, block: Block, times: Callable[[Matmul], int]) -> float:
        """Elements of weights on one worker, each as many `times` as they pass the memory."""
        axes = self.case.axes
        return (
            sum(
                times(layer) * layer.inputs * layer.outputs * max(1.0, layer.groups / axes.experts)
                for layer in block.matmuls
            )
            / axes.tensor
        )

    def _launches_s(self, launches: float, busy_s: float) -> float:
        """Seconds that launching adds to those in which the device is busy."""
        device = self.case.cluster.device
        needed = launches * device.launch_s
        return needed if device.is_synchronous else max(0.0, needed - busy_s)

    def _moved(self, block: Block, spread: int, constants: Constants) -> float:
        """Elements per token that element-wise operations move; `spread` workers split those between products."""
        shared = block.moved / spread + block.moved_split / self.case.axes.tensor
        if block.single is None:
            return shared * self._passes(constants)
        if self.case.software.kernels == "single":
            return block.single * shared / max(1e-9, block.moved + block.moved_split)
        return shared  # counted, with saved copies and casts

    def _attention(self, block: Block, constants: Constants) -> tuple[float, float]:
        """Seconds of attention's forward and backward."""
        case, attention = self.case, block.attention
        if attention is None:
            return 0.0, 0.0
        device, tensor = case.cluster.device, case.axes.tensor
        flops = attention.flops(case.micro_tokens) / tensor
        if case.software.attention == "unfused":
            on_grid = 1.0 if attention.head_size % 8 == 0 else OFF_GRID_RATE
            dense = flops / (self._rate("bf16", constants) * UNFUSED_RATE * on_grid)
            scores = attention.heads / tensor * case.micro_tokens * attention.span
            moved = scores * SCORE_PASSES / device.memory_bandwidth * self._passes(constants)
            return dense + moved, 2 * dense + BACKWARD_SCORES * moved
        rate = device.attention[case.software.attention] * constants.attention
        if case.precision in ("fp32", "fp16"):
            rate *= device.peak_of(case.precision) / device.peak["bf16"]
        rate *= SMALL_HEAD_RATE if attention.head_size < SMALL_HEADS else 1.0
        needed = flops * (0.5 if attention.causal and case.software.skips_pairs else 1.0)
        backward = BACKWARD_ATTENTION if attention.needs_backward else 0.0
        return needed / rate * FORWARD_ATTENTION, needed / rate * backward

    def _repeated(self, forward: Mapping[str, float], recompute: Recompute) -> float:
        """Seconds of what backward computes again."""
        case, whole = self.case, sum(forward.values())
        if recompute == "full":
            return whole
        if recompute == "half":  # every second block
            return whole / 2
        if recompute == "none":
            return 0.0
        if case.software.selective == "attention":
            return forward["attention"]
        return forward["products"] / 2 + forward["moves"]  # every second product's result is kept

    def _head_s(self, constants: Constants) -> tuple[float, float]:
        """Seconds of forward and backward of a micro-batch through the head, or what else is in no block."""
        case, forward_s, backward_s = self.case, 0.0, 0.0
        rate = self._rate("bf16" if case.precision == "fp8" else case.precision, constants)
        if case.model.vocabulary:
            words = case.micro_tokens * case.model.vocabulary / case.axes.tensor
            moved = words * HEAD_BYTES / case.cluster.device.memory_bandwidth * max(1.0, self._passes(constants) / 2)
            forward, backward = self._head
            forward_s += forward.flops(constants.depth) / rate + moved
            backward_s += backward.flops(constants.depth) / rate + 2 * moved
        if case.model.rest is not None and self._rest is not None:
            rest = self._block(case.model.rest, self._rest, constants, "none")
            forward_s, backward_s = forward_s + rest.forward_s, backward_s + rest.backward_s
        return forward_s, backward_s

    # Communication.

    def _tensor_s(self, block: Block, constants: Constants) -> float:
        """Two all-reduces of a micro-batch's activations, or with `sequence` as much in halves (Megatron-LM)."""
        case, tensor = self.case, self.case.axes.tensor
        if tensor == 1:
            return 0.0
        num_bytes = case.micro_tokens * block.hidden * case.value_bytes
        inside = case.axes.inside(tensor, 1, case.cluster.devices_per_host)
        hidden = case.software.hides_tensor and case.axes.sequence
        both = gather_s(num_bytes, tensor, inside, case.cluster, constants, of="gather")
        both += gather_s(num_bytes, tensor, inside, case.cluster, constants, of="scatter")
        return 2 * both * (constants.exposed if hidden else 1.0)

    def _context_s(self, block: Block, constants: Constants) -> float:
        """Keys and values of all tokens, half of it behind attention."""
        case, axes, attention = self.case, self.case.axes, block.attention
        if axes.context == 1 or attention is None:
            return 0.0
        num_bytes = case.micro_tokens * axes.context * attention.kv_elements / axes.tensor * case.value_bytes
        inside = axes.inside(axes.context, axes.tensor, case.cluster.devices_per_host)
        return gather_s(num_bytes, axes.context, inside, case.cluster, constants, of="gather") / 2

    def _experts_s(self, block: Block, constants: Constants) -> float:
        """Tokens to their experts and back."""
        case, axes = self.case, self.case.axes
        if axes.experts == 1 or block.experts == 1:
            return 0.0
        num_bytes = case.micro_tokens * block.routed * block.hidden * case.value_bytes / axes.tensor
        inside = axes.inside(axes.experts, axes.tensor * axes.context, case.cluster.devices_per_host)
        return 2 * exchange_s(num_bytes, axes.experts, inside, case.cluster, constants)

    def _send_s(self, constants: Constants) -> float:
        """Activations to the next stage and gradients back, for one micro-batch, through all chunks."""
        case, axes = self.case, self.case.axes
        if case.software.hides_sends and axes.chunks > 1:
            return 2 * axes.chunks * latency_s(case.cluster, constants)
        num_bytes = case.micro_tokens * case.model.hidden * case.value_bytes / axes.tensor
        if axes.workers > case.cluster.devices_per_host:
            seconds = num_bytes * case.cluster.devices_per_host / (case.cluster.network * constants.network)
        else:
            seconds = num_bytes / (case.cluster.device.link * constants.link)
        return 2 * axes.chunks * (seconds + latency_s(case.cluster, constants))
