"""What a model costs, block by block, without a device: matrix products, attention, moved elements, kept values.

A block is described for one token, so that micro-batches of any size follow. `transformer` makes the description from
a transformer's sizes.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from paceline.errors import PlanError

__all__ = ["ADAM_BYTES", "Attention", "Block", "Matmul", "ModelCosts", "transformer"]

ADAM_BYTES = 8.0  # two moments in 32 bit
DROPOUT_BYTES = 2  # masks after attention and MLP, a byte each


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Matmul:
    """A linear layer: `rows` x inputs times inputs x outputs, where `rows` is how often each token takes it.

    `split`: which dimension tensor parallel divides (the outputs of a "column", the inputs of a "row" layer).
    `needs_inputs` and `needs_weights`: whether backward computes the gradient of its inputs, and of its weights.
    `groups`: of experts, which share the rows and have weights of their own.
    """

    inputs: int
    outputs: int
    split: Literal["outputs", "inputs"] | None = None
    rows: float = 1.0
    needs_inputs: bool = True
    needs_weights: bool = True
    groups: int = 1

    def flops(self, tokens: float) -> float:
        """Floating-point operations of its forward."""
        return 2.0 * tokens * self.rows * self.inputs * self.outputs

    @property
    def passes(self) -> int:
        """Products as large as this one, in forward and backward together."""
        return 1 + self.needs_inputs + self.needs_weights


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Scores of each token with `span` others, and their weighted sum of values; tensor parallel divides heads.

    `kv_elements`: keys and values of a token. `kv_heads`: of the heads, those of keys and values (0: as many).
    """

    heads: int
    head_size: int
    span: float
    kv_elements: float
    causal: bool = True
    kv_heads: int = 0
    needs_backward: bool = True

    def flops(self, tokens: float) -> float:
        """Operations of its forward over all pairs of tokens; half of them count if `causal` ones are skipped."""
        return 4.0 * tokens * self.span * self.heads * self.head_size


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One block that is there `count` times.

    Per token and block: `moved` elements are read and written by element-wise operations (norms, residuals), and
    `moved_split` by those that tensor parallel divides (activation functions, rotations); `kept` and `kept_split` bytes
    are kept for backward in 16 bit, without the scores of attention. `experts` and `routed`: of how many experts each
    token takes how many; their parameters are `expert_parameters`, contained in `parameters`. `shapes`: rows and
    columns of the trained parameters, where they are known; otherwise those of the products.

    `frozen`: parameters that are not trained, contained in `parameters`; `frozen_experts` those in `expert_parameters`.
    `followed`: the share of element-wise operations that have a backward. `again`: the share of the forward that the
    model itself computes again in backward (torch.utils.checkpoint); of that, `kept` and `kept_split` have only the
    inputs, and `working` and `working_split` what the largest region keeps while it is computed again.
    """

    count: int
    parameters: int
    matmuls: tuple[Matmul, ...]
    hidden: int
    attention: Attention | None = None
    moved: float = 0.0
    moved_split: float = 0.0
    kept: float = 0.0
    kept_split: float = 0.0
    single: float | None = None  # elements moved by kernels of one operation each, where that was counted
    launches: int = 0  # kernels of one operation each in a forward, where that was counted
    experts: int = 1
    routed: int = 1
    expert_parameters: int = 0
    frozen: int = 0
    frozen_experts: int = 0
    followed: float = 1.0
    again: float = 0.0
    working: float = 0.0
    working_split: float = 0.0
    shapes: tuple[tuple[int, int], ...] = ()

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of the trained parameters; what is in no product is a column."""
        if self.shapes or self.frozen == self.parameters:
            return self.shapes
        found = tuple((layer.outputs, layer.inputs) for layer in self.matmuls)
        left = self.parameters - sum(rows * columns for rows, columns in found)
        return (*found, (left, 1)) if left > 0 else found

    @property
    def needs_backward(self) -> bool:
        """Whether a gradient passes through it: not in frozen blocks below the first trained layer."""
        return (
            self.followed > 0
            or any(one.needs_inputs or one.needs_weights for one in self.matmuls)
            or (self.attention is not None and self.attention.needs_backward)
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelCosts:
    """A model of blocks, all with the same `hidden` elements per token between them.

    Before and behind them are an embedding and a head over `vocabulary` words, or `rest`, which is whatever is in no
    block. A sample has `sequence` tokens; where a model has no tokens, it is one.
    """

    blocks: tuple[Block, ...]
    sequence: int
    vocabulary: int = 0
    tied: bool = False  # embedding and head are one matrix
    rest: Block | None = None
    optimizer_bytes: float = ADAM_BYTES  # state of a trained parameter
    stepped_whole: float = 0.0  # share of the trained parameters that the optimizer looks at as wholes

    @property
    def count(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def hidden(self) -> int:
        return self.blocks[0].hidden

    @property
    def is_routed(self) -> bool:
        """Whether there is a mixture of experts."""
        return any(block.experts > 1 for block in self.blocks)

    @property
    def parameters(self) -> int:
        ends = (1 if self.tied else 2) * self.vocabulary * self.hidden
        return sum(block.count * block.parameters for block in self._all) + ends

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Rows and columns of all parameters, and how many there are of each."""
        ends = [(self.vocabulary, self.hidden, 1 if self.tied else 2)] if self.vocabulary else []
        return ends + [(*shape, block.count) for block in self._all for shape in block.matrices]

    @property
    def trained(self) -> int:
        """Parameters that have gradients and optimizer state."""
        return self.parameters - sum(block.count * block.frozen for block in self._all)

    @property
    def used_parameters(self) -> float:
        """Parameters that a token takes: of all experts only the routed ones, and no embedding."""
        idle = sum(block.count * block.expert_parameters * (1 - block.routed / block.experts) for block in self._all)
        return self.parameters - idle - (0 if self.tied else self.vocabulary * self.hidden)

    def model_flops(self, tokens: float) -> float:
        """Operations of forward and backward, as model-FLOPs utilisation counts them: three times forward's products,
        and attention over all pairs, of which causal models need half (Chowdhery et al., "PaLM", 2022, appendix B).
        Gradients that frozen layers do not need are left out.
        """
        total = 6.0 * tokens * self.vocabulary * self.hidden
        for block in self._all:
            total += block.count * sum(layer.passes * layer.flops(tokens) for layer in block.matmuls)
            if block.attention is not None:
                passes = 3 if block.attention.needs_backward else 1
                total += passes * block.count * block.attention.flops(tokens) * (0.5 if block.attention.causal else 1.0)
        return total

    @property
    def _all(self) -> tuple[Block, ...]:
        return self.blocks if self.rest is None else (*self.blocks, self.rest)


def transformer(
    *,
    layers: int,
    hidden: int,
    heads: int,
    sequence: int,
    vocabulary: int,
    ffn: int | None = None,
    kv_heads: int | None = None,
    gated: bool = False,
    tied: bool = False,
    dropout: bool = False,
    experts: int = 1,
    routed: int = 1,
    causal: bool = True,
) -> ModelCosts:
    """Return the costs of a transformer from its sizes.

    `gated`: the MLP has three matrices (SwiGLU) instead of two. `experts` and `routed`: a mixture of experts in each
    block. `dropout`: masks are kept. Kept bytes follow Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models" (2022), table 2: of 34 bytes per token and hidden unit, 10 are not split by tensor parallel.

    Raises PlanError for sizes below 1, and heads that do not divide `hidden`'s share of key-value heads.
    """
    ffn, kv_heads = ffn or 4 * hidden, kv_heads or heads
    for name, value in {"layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence, "ffn": ffn}.items():
        if value < 1:
            raise PlanError(f"A transformer's {name} is {value}; it must be at least 1.")
    if heads % kv_heads:
        raise PlanError(f"{heads} heads cannot share {kv_heads} key-value heads: give a divisor of {heads}.")
    if not 1 <= routed <= experts:
        raise PlanError(f"Each token takes {routed} of {experts} experts; give 1 to {experts}.")
    head_size = max(1, hidden // heads)
    kv = kv_heads * head_size
    into = 2 if gated else 1
    matmuls = (
        Matmul(inputs=hidden, outputs=hidden + 2 * kv, split="outputs"),
        Matmul(inputs=hidden, outputs=hidden, split="inputs"),
        Matmul(inputs=hidden, outputs=into * ffn, split="outputs", rows=routed),
        Matmul(inputs=ffn, outputs=hidden, split="inputs", rows=routed),
    )
    mlp = (into + 1) * hidden * ffn
    masks = DROPOUT_BYTES * hidden if dropout else 0
    # Kept whole: inputs of both norms, and of both column layers. Split: queries, keys, values, attention's result, and
    # what the MLP's activation function takes and makes.
    kept_mlp = routed * (2 * into + (2 if gated else 0) + 2) * ffn
    return ModelCosts(
        blocks=(
            Block(
                count=layers,
                hidden=hidden,
                parameters=2 * hidden * hidden + 2 * hidden * kv + mlp * experts + 4 * hidden,
                matmuls=matmuls,
                attention=Attention(
                    heads=heads,
                    head_size=head_size,
                    span=float(sequence),
                    kv_elements=2.0 * kv,
                    causal=causal,
                    kv_heads=kv_heads,
                ),
                moved=10.0 * hidden,  # norms: read, write, twice; residuals: two read, one written, twice
                moved_split=4.0 * hidden + (into + 1) * routed * ffn,
                kept=8.0 * hidden + masks,
                kept_split=2.0 * (hidden + 2 * kv) + 2.0 * hidden + kept_mlp,
                experts=experts,
                routed=routed,
                expert_parameters=mlp * experts if experts > 1 else 0,
            ),
        ),
        sequence=sequence,
        vocabulary=vocabulary,
        tied=tied,
    )
