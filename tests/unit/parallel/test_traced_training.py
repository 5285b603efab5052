"""What a trace knows of training: frozen layers, recompute of the model's own, and routed experts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from imported import Later
from paceline.parallel.expert.find_experts import routed_experts
from paceline.parallel.fully_sharded.sharded_units import units_of
from paceline.parallel.meta.fake_weights import fake_weights
from paceline.parallel.meta.traced_costs import trace_costs
from paceline.planner.model_costs import Block, ModelCosts

TOKENS, WIDTH = 64, 32
transformers: Any = Later("transformers")


def traced(model: nn.Module, sample: Tensor) -> ModelCosts:
    def run(fake: Any) -> Any:
        return model(fake(sample))

    return trace_costs(model, run, samples=len(sample), units=units_of(model), experts=routed_experts(model))


def forward_flops(found: ModelCosts) -> float:
    blocks = (*found.blocks, *((found.rest,) if found.rest is not None else ()))
    return sum(one.count * layer.flops(1) for one in blocks for layer in one.matmuls)


def kept_bytes(found: ModelCosts) -> float:
    return sum(one.count * (one.kept + one.kept_split) for one in found.blocks)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank one beside it that is trained."""

    def __init__(self, *, is_adapted: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.low = nn.Sequential(nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False))
        self.is_adapted = is_adapted
        if not is_adapted:
            self.low = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (self.low(x) if self.is_adapted else x)


def test_frozen_layers_have_no_gradient_of_weights_and_none_at_all_below_the_first_trained_one() -> None:
    model = nn.Sequential(Adapted(is_adapted=False), Adapted(is_adapted=True), Adapted(is_adapted=False))
    below, adapted, above = traced(model, torch.zeros(2, TOKENS, WIDTH)).blocks
    base = 2 * TOKENS * WIDTH * WIDTH

    def backward(block: Block) -> float:
        return sum((layer.passes - 1) * layer.flops(1) for layer in block.matmuls)

    assert (below.frozen, adapted.frozen, above.frozen) == (WIDTH * WIDTH,) * 3
    assert backward(below) == 0
    assert below.kept + below.kept_split == 0
    assert not below.needs_backward
    assert backward(adapted) == pytest.approx(base * (2 / WIDTH) * 3)  # of the small ones: A's weights, both of B
    assert backward(above) == base  # of its input only
    assert above.needs_backward


def test_what_runs_without_gradients_has_no_backward() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.taught, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(x)
            return self.taught(x) - wanted

    first, second = traced(Teacher(), torch.zeros(2, TOKENS, WIDTH)).blocks[0].matmuls
    assert (first.passes, second.passes) == (1, 2)


class Mlp(nn.Module):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        if not self.recompute:
            return x + self.layers(x)
        return x + checkpoint(self.layers, x, use_reentrant=self.recompute == "reentrant")  # pyright: ignore[reportReturnType, reportOperatorIssue]


class Stack(nn.Module):
    def __init__(self, recompute: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Mlp(recompute) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("how", ["reentrant", "other"])
def test_what_the_model_recomputes_is_not_kept_and_runs_again(how: str) -> None:
    plain, again = (traced(Stack(recompute), torch.zeros(2, TOKENS, WIDTH)).blocks[-1] for recompute in ("", how))
    inside = 2 * TOKENS * 4 * WIDTH  # tanh's result, in 16 bit
    entry = 2 * TOKENS * WIDTH
    assert plain.kept + plain.kept_split == inside + entry
    assert again.kept + again.kept_split == entry
    assert again.working + again.working_split == inside
    assert (plain.again, again.again) == (0.0, 1.0)
    assert sum(one.flops(1) for one in again.matmuls) == sum(one.flops(1) for one in plain.matmuls)
    assert [one.passes for one in again.matmuls] == [3, 3]


@contextlib.contextmanager
def saved(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Within it, real bytes that autograd keeps are counted, each memory once, without the model's own."""
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(one.untyped_storage().nbytes() for one in found.values())


def llama(**changes: Any) -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 200, "use_cache": False}
    config = transformers.LlamaConfig
    return transformers.LlamaForCausalLM(config(**{**sizes, **changes}, attn_implementation="sdpa")).train()


@pytest.mark.thorough
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_kept_bytes_of_a_language_model_are_those_of_a_real_run(reentrant: bool | None) -> None:
    model, sample = llama(), torch.randint(0, 200, (2, TOKENS))
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with saved(model) as real:
        result = model(sample)
        kept = real()
    del result
    found = traced(model, sample)
    ends = 2 * (found.rest.kept + found.rest.kept_split) if found.rest is not None else 0
    assert 2 * 2 * kept_bytes(found) + 2 * ends == pytest.approx(kept, rel=0.02)  # 2 samples, values of 32 bit
    assert {one.again for one in found.blocks} == {0.0 if reentrant is None else 1.0}
    assert all(one.attention is not None and one.attention.causal for one in found.blocks)
    assert {one.attention.kv_heads for one in found.blocks if one.attention} == {2}


@pytest.mark.thorough
@pytest.mark.parametrize(("mask", "causal"), [(1, True), (0, False)])
def test_attention_skips_pairs_as_the_mask_of_the_data_lets_it(mask: int, causal: bool) -> None:
    model, ids = llama(), torch.zeros(2, TOKENS, dtype=torch.long)
    given = torch.ones(2, TOKENS, dtype=torch.long)
    given[1, -3:] = mask  # padding

    def run(fake: Any) -> Any:
        return model(input_ids=fake(ids), attention_mask=fake(given))

    found = trace_costs(model, run, samples=2, units=units_of(model))
    assert {one.attention.causal for one in found.blocks if one.attention} == {causal}
    assert given[1, -3:].tolist() == [mask] * 3


def test_labels_that_choose_tokens_have_their_numbers() -> None:
    class Chosen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, WIDTH), nn.Linear(WIDTH, 10)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            is_masked = y != -100
            return F.cross_entropy(self.head(self.embedding(x)[is_masked]), y[is_masked])

    model, x = Chosen(), torch.zeros(2, TOKENS, dtype=torch.long)
    y = torch.where(torch.arange(TOKENS) < 10, 1, -100).expand(2, TOKENS)
    found = trace_costs(model, lambda fake: model(fake(x), fake(y)), samples=2, units=())
    assert sum(one.flops(1) for one in found.blocks[0].matmuls) == 2 * 10 * WIDTH * 10  # of ten tokens


def mixtral(experts: int, **changes: Any) -> Any:
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 200, "num_local_experts": experts}
    config = transformers.MixtralConfig
    with fake_weights():
        return transformers.MixtralForCausalLM(
            config(**{**sizes, **changes}, num_experts_per_tok=2, attn_implementation="sdpa")
        )


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["grouped_mm", "eager"])
def test_a_token_takes_its_share_of_a_mixture_of_experts(implementation: str) -> None:
    model = mixtral(8)
    model.set_experts_implementation(implementation)
    found = traced(model, torch.zeros(2, TOKENS, dtype=torch.long))
    block = found.blocks[-1]
    expert = 3 * 64 * 128
    assert (block.experts, block.routed, block.expert_parameters) == (8, 2, 8 * expert)
    attention, router, head = 64 * (64 + 32 + 32 + 64), 64 * 8, 64 * 200
    assert forward_flops(found) == 2 * TOKENS * (2 * (attention + router + 2 * expert) + head)
    assert found.used_parameters == found.parameters - 2 * 6 * expert
    grouped = [(one.groups, one.rows) for one in block.matmuls if one.groups > 1]
    assert grouped == [(8, 2 * TOKENS)] * 2


class Experts(nn.Module):
    """Stacked experts as this project's protocol has them, which ask where each one's tokens are."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.zeros(count, WIDTH, 2 * WIDTH))
        self.down = nn.Parameter(torch.zeros(count, 2 * WIDTH, WIDTH))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            at, slot = torch.where(index == number)
            made = F.gelu(tokens[at] @ self.up[number]) @ self.down[number]
            out = out.index_add(0, at, made * weights[at, slot, None])
        return out


class OutsideExperts(nn.Module):
    """Experts in a list, which the module that routes calls itself, after it has counted their tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.members = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        counts = torch.bincount(index.flatten(), minlength=len(self.members)).tolist()
        order = index.flatten().argsort()
        given = tokens.repeat_interleave(index.shape[1], dim=0)[order].split(counts)
        made = torch.cat([member(one) for member, one in zip(self.members, given, strict=True)])
        out = torch.zeros_like(made).index_copy(0, order, made)
        return (out.view(*index.shape, -1) * weights[..., None]).sum(dim=1)


class Routed(nn.Module):
    def __init__(self, experts: nn.Module, count: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, count), experts

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        return self.experts(tokens, index, weights).view_as(x)


@pytest.mark.parametrize(("kind", "each"), [(Experts, 4 * WIDTH * WIDTH), (OutsideExperts, WIDTH * WIDTH)])
def test_code_that_asks_which_tokens_an_expert_gets_is_counted_with_even_shares(kind: Any, each: int) -> None:
    model = nn.Sequential(Routed(kind(4), 4), Routed(kind(4), 4))
    found = traced(model, torch.zeros(2, TOKENS, WIDTH))
    assert forward_flops(found) == 2 * 2 * TOKENS * (WIDTH * 4 + 2 * each)
    assert {one.experts for one in found.blocks} == {4 if kind is Experts else 1}


def test_experts_of_which_some_are_frozen() -> None:
    model = nn.Sequential(Routed(Experts(4), 4), Routed(Experts(4), 4))
    functools.reduce(getattr, ("1", "experts", "up"), model).requires_grad_(False)
    first, second = traced(model, torch.zeros(2, TOKENS, WIDTH)).blocks
    assert (first.frozen, first.frozen_experts) == (0, 0)
    assert (second.frozen, second.frozen_experts) == (8 * WIDTH * WIDTH, 8 * WIDTH * WIDTH)
