"""A transformer's costs, beside figures that others print."""

from __future__ import annotations

import pytest

from paceline.errors import PlanError
from paceline.planner.model_costs import transformer

LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "gated": True}


@pytest.mark.parametrize(
    ("sizes", "parameters"),
    [
        ({**LLAMA_8B, "vocabulary": 128256}, 8.03e9),  # Llama 3.1 8B
        ({"layers": 96, "hidden": 12288, "heads": 96, "vocabulary": 51200, "tied": True}, 174.6e9),  # GPT-3
        ({**LLAMA_8B, "vocabulary": 32000, "experts": 8, "routed": 2}, 46.7e9),  # Mixtral 8x7B
        ({"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 50257, "tied": True}, 124e6),  # GPT-2
    ],
)
def test_parameters_are_those_of_known_models(sizes: dict[str, int], parameters: float) -> None:
    assert transformer(sequence=2048, **sizes).parameters == pytest.approx(parameters, rel=0.01)  # pyright: ignore[reportArgumentType]


def test_a_token_takes_only_its_experts() -> None:
    mixtral = transformer(**LLAMA_8B, vocabulary=32000, experts=8, routed=2, sequence=4096)  # pyright: ignore[reportArgumentType]
    assert mixtral.used_parameters + 32000 * 4096 == pytest.approx(12.9e9, rel=0.01)


def test_operations_are_six_for_each_parameter_and_token_and_attention() -> None:
    gpt = transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200, tied=True, causal=False)
    tokens = 1536 * 2048.0
    # Narayanan et al. 2021, eq. 3, without recompute: 72 B s l h^2 (1 + s / (6 h) + V / (12 l h)).
    printed = 72 * tokens * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))
    assert gpt.model_flops(tokens) == pytest.approx(printed, rel=0.005)


def test_products_are_two_operations_for_each_of_the_blocks_parameters() -> None:
    block = transformer(**LLAMA_8B, sequence=8192, vocabulary=128256).blocks[0]  # pyright: ignore[reportArgumentType]
    flops = sum(one.flops(1.0) for one in block.matmuls)
    assert flops == pytest.approx(2 * (block.parameters - 4 * 4096))


def test_kept_bytes_are_those_of_korthikanti() -> None:
    block = transformer(layers=1, hidden=1024, heads=16, sequence=2048, vocabulary=100, dropout=True).blocks[0]
    assert (block.kept, block.kept_split) == (10 * 1024, 24 * 1024)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"heads": 8, "kv_heads": 3}, "8 heads cannot share 3"),
        ({"experts": 4, "routed": 5}, "5 of 4 experts"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], says: str) -> None:
    usual = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 100}
    with pytest.raises(PlanError, match=says):
        transformer(**{**usual, **sizes})  # pyright: ignore[reportArgumentType]
