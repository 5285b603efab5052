"""Costs that are counted on a model without weights, beside those that follow from its sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from imported import Later
from paceline.parallel.expert.find_experts import routed_experts
from paceline.parallel.fully_sharded.sharded_units import units_of
from paceline.parallel.meta.fake_weights import fake_weights
from paceline.parallel.meta.traced_costs import trace_costs
from paceline.planner.model_costs import ModelCosts, transformer

TOKENS, VOCABULARY = 64, 512
transformers: Any = Later("transformers")


def llama(**changes: int) -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 128, "num_attention_heads": 8}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 352, "vocab_size": VOCABULARY}
    config = transformers.LlamaConfig
    return transformers.LlamaForCausalLM(config(**{**sizes, **changes}, attn_implementation="sdpa"))


def traced(model: nn.Module, *samples: Tensor) -> ModelCosts:
    def run(fake: Any) -> Any:
        return model(*fake(samples))

    return trace_costs(model, run, samples=len(samples[0]), units=units_of(model), experts=routed_experts(model))


@pytest.mark.thorough
def test_a_language_model_costs_what_follows_from_its_sizes() -> None:
    with fake_weights():
        model = llama()
    found = traced(model, torch.zeros(2, TOKENS, dtype=torch.long))
    sizes = transformer(
        layers=3, hidden=128, heads=8, kv_heads=2, ffn=352, gated=True, sequence=TOKENS, vocabulary=VOCABULARY
    )
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert found.model_flops(1) == pytest.approx(sizes.model_flops(TOKENS))
    assert sum(block.count for block in found.blocks) == 3
    block, ideal = found.blocks[-1], sizes.blocks[0]
    assert block.hidden == TOKENS * 128
    assert block.attention is not None and ideal.attention is not None
    assert block.attention.causal
    assert block.attention.kv_elements == ideal.attention.kv_elements * TOKENS
    assert block.kept_split == pytest.approx(ideal.kept_split * TOKENS, rel=0.02)
    assert ideal.kept * TOKENS <= block.kept <= 2.5 * ideal.kept * TOKENS  # its norms keep more than they need
    assert block.single is not None
    fused, single = block.moved + block.moved_split, block.single
    assert (ideal.moved + ideal.moved_split) * TOKENS <= fused < single


@pytest.mark.thorough
def test_costs_are_those_of_one_sample_whatever_was_counted() -> None:
    model = llama()
    one, four = (traced(model, torch.zeros(n, TOKENS, dtype=torch.long)) for n in (1, 4))
    assert four.model_flops(1) == pytest.approx(one.model_flops(1))
    assert four.blocks[-1].kept_split == pytest.approx(one.blocks[-1].kept_split, rel=0.01)
    assert four.blocks[-1].moved == pytest.approx(one.blocks[-1].moved, rel=0.05)


@pytest.mark.thorough
def test_the_model_stays_as_it_was() -> None:
    model = llama()
    before = {name: (one.data_ptr(), one.device) for name, one in model.named_parameters()}
    hooks = [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in model.modules()]
    traced(model, torch.zeros(2, TOKENS, dtype=torch.long))
    assert {name: (one.data_ptr(), one.device) for name, one in model.named_parameters()} == before
    assert [len(block._forward_hooks) + len(block._forward_pre_hooks) for block in model.modules()] == hooks
    assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_convolutions_count_as_products() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, groups=4), nn.Flatten())
    found = traced(model, torch.zeros(4, 3, 10, 10))
    flops = sum(one.flops(1) for one in found.blocks[0].matmuls)
    assert flops == 2 * (10 * 10 * 16 * 27 + 8 * 8 * 16 * (4 * 9))


@pytest.mark.thorough
@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_are_one_kernel(layer: Any, gates: int) -> None:
    found = traced(layer(8, 16, batch_first=True), torch.zeros(2, 50, 8))
    block = found.blocks[0]
    assert sum(one.flops(1) for one in block.matmuls) == 2 * 50 * gates * (8 * 16 + 16 * 16)
    assert block.launches < 10


def test_transposed_convolutions_count_as_products() -> None:
    found = traced(nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1, groups=2), torch.zeros(4, 16, 10, 10))
    assert sum(one.flops(1) for one in found.blocks[0].matmuls) == 2 * 10 * 10 * 16 * 4 * 16


def test_a_mask_is_no_part_of_what_passes_between_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x) * mask.sum(dim=-1, keepdim=True)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, torch.ones(len(x), 64, 64))
            return x

    assert {block.hidden for block in traced(Model(), torch.zeros(2, 64, 8)).blocks} == {64 * 8}


def test_torchs_own_attention_is_seen_as_attention() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 3)
    found = traced(model, torch.zeros(2, 10, 64))
    attention = found.blocks[-1].attention
    assert attention is not None
    assert (attention.heads, attention.head_size, attention.span, attention.causal) == (4, 16, 100.0, False)
    assert found.blocks[-1].followed == 1.0  # also what torch does within one operation has a backward


def test_a_value_that_is_kept_twice_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y = x.tanh()
            return self.one(y) + self.other(y)

    found = traced(Twice(), torch.zeros(2, 8, 64, requires_grad=True))
    block = found.blocks[0]
    assert block.kept + block.kept_split == 2 * 8 * 64  # y, in 16 bit: of tanh and of both products


def test_code_that_looks_at_values_is_refused_by_torch() -> None:
    class Looks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if float(x.sum()) > 0 else -x

    with pytest.raises(Exception, match="_local_scalar_dense"):
        traced(Looks(), torch.zeros(2, 4))
