"""How a split is verified: on random weights that overlap in memory, and on weights apart where a block writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel import trial_types
from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor import verify
from paceline.parallel.tensor.fewer_rows import with_fewer_rows
from paceline.parallel.tensor.find_plan import find_plan
from paceline.parallel.tensor.gradient_sketch import sketch
from paceline.parallel.tensor.layers import Layer, Role
from paceline.parallel.tensor.random_weights import RandomWeights
from paceline.parallel.tensor.verify import disagreement


class Mlp(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


LAYERS = [Layer(name="up", role="column", sections=(32,)), Layer(name="down", role="row", sections=(32,))]
CALL = SampleInput(args=(torch.ones(2, 8),))


class WritesItsWeight(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.norm.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Scaled(Mlp):
    """Another function of the parts than of the whole, which no rule sees: each worker has the sum of its own part."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.up.weight.detach().sum()


def storage_bytes(model: nn.Module) -> int:
    found = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in model.parameters()}
    return sum(found.values())


def test_copies_of_a_model_take_the_memory_of_its_largest_tensors_and_share_it() -> None:
    model = nn.Sequential(*(Mlp(64) for _ in range(20)))
    weights = RandomWeights(model, torch.float32, frozen=(), overlap=True)
    whole = sum(one.nbytes for one in model.parameters())
    assert storage_bytes(weights.whole) < 0.15 * whole
    further = weights.copy()
    assert {one.data_ptr() for one in further.parameters()} == {one.data_ptr() for one in weights.whole.parameters()}
    numbers = [tuple(one.flatten()[:8].tolist()) for one in weights.whole.parameters()]
    assert len(set(numbers)) == len(numbers), "no two begin with the same numbers"


def test_tied_parameters_stay_tied_and_those_that_are_frozen_get_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    weights = RandomWeights(model, torch.float64, frozen={id(model[0].bias)}, overlap=True)
    for one in (weights.whole, weights.copy()):
        assert one[1].weight is one[0].weight  # type: ignore  # of a Sequential
        one(torch.ones(1, 8).double()).sum().backward()
        assert [name for name, each in one.named_parameters() if each.grad is None] == ["0.bias"]


@pytest.mark.parametrize("block", [Mlp, WritesItsWeight])
@pytest.mark.parametrize("most_in_double", [1 << 24, 4])  # the second computes in single precision
def test_a_right_split_is_found_right(block: type[Mlp], most_in_double: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MOST_IN_DOUBLE", most_in_double)
    assert disagreement(block(), LAYERS, CALL, size=2, sequence=False) is None


@pytest.mark.parametrize("most_in_double", [1 << 24, 4])
def test_a_wrong_split_is_found_wrong(most_in_double: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "MOST_IN_DOUBLE", most_in_double)
    why = disagreement(Scaled(), LAYERS, CALL, size=2, sequence=False)
    assert why is not None and "off by" in why


def test_a_write_to_a_shared_weight_is_seen() -> None:
    weights = RandomWeights(WritesItsWeight(), torch.float64, frozen=(), overlap=True)
    assert not weights.is_written
    weights.whole(torch.ones(2, 8).double())
    assert weights.is_written


class Typed(nn.Module):
    """Heads whose type a whole tensor takes, as rotary embeddings do it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.up(x).view(*x.shape[:-1], 4, 4)
        angle = torch.arange(4).cos().type_as(heads)
        return self.down((heads * angle).reshape(*x.shape[:-1], 16))


@pytest.mark.thorough
def test_a_whole_tensor_takes_the_type_of_a_split_one() -> None:
    plan = find_plan(Typed(), size=2, sample=(torch.ones(2, 8),))
    assert {layer.name: layer.role for layer in plan.layers} == {"up": "column", "down": "row"}


def test_blocks_inside_that_are_verified_are_run_and_get_no_gradient() -> None:
    model = nn.Sequential(Mlp(), nn.Linear(8, 8))
    inside = [Layer(name=f"0.{one.name}", role=one.role, sections=one.sections) for one in LAYERS]
    assert disagreement(model, inside, CALL, size=2, sequence=False, verified=[model[0]]) is None
    wrong = nn.Sequential(Scaled(), nn.Linear(8, 8))
    assert disagreement(wrong, inside, CALL, size=2, sequence=False, verified=[wrong[0]]) is not None


class OffInGradients(Mlp):
    """Right in what it returns, wrong in what its weights get: each worker adds a part of its own."""

    def forward(self, x: Tensor) -> Tensor:
        out, up = super().forward(x), self.up.weight
        return out + (up.sum() * up.detach().sum() - up.detach().sum() * up.detach().sum())


@pytest.mark.parametrize("most_in_double", [1 << 24, 4])
def test_a_split_that_is_wrong_in_gradients_alone_is_found_wrong(
    most_in_double: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "MOST_IN_DOUBLE", most_in_double)
    why = disagreement(OffInGradients(), LAYERS, CALL, size=2, sequence=False)
    assert why is not None and why.startswith("the gradient of up.weight")


def test_what_single_precision_cannot_show_is_tried_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_types, "MOST_AT_FIRST", 4)
    tried: list[torch.dtype] = []
    run = verify._BlockTrial.run

    def noted(trial: Any, block: nn.Module, dtype: torch.dtype, frozen: Any) -> str | None:
        tried.append(dtype)
        return "off" if dtype is torch.float32 else run(trial, block, dtype, frozen)

    monkeypatch.setattr(verify._BlockTrial, "run", noted)
    assert disagreement(Mlp(), LAYERS, CALL, size=2, sequence=False) is None
    assert tried == [torch.float32, torch.float64]


def test_a_gradient_is_compared_by_its_products_with_fixed_vectors() -> None:
    one = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = sketch(one)
    assert found.shape == (6, 5, 4) and [len(each) for each in found.sums] == [6, 5, 4]
    assert torch.allclose(sketch(one[2:4]).sums[0], found.sums[0][2:4]), "a part along a dim has a part of its numbers"
    for other in (one.flip(1), one.roll(1, 2), one * 1.01, one + 1e-3 * torch.eye(5, 4)):
        assert any(float((a - b).abs().max()) > 1e-4 for a, b in zip(sketch(other).sums, found.sums, strict=True))
    sizes = torch.stack([each.abs().max() for each in sketch(torch.ones(300, 300)).sums])
    assert bool((sizes < 5).all()), "about as large as one of the gradient's own"
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), torch.ones(3, 4), (5, 4), check_invariants=True)
    assert torch.equal(sketch(sparse).sums[0], sketch(sparse.to_dense()).sums[0])


def vocabulary(role: Role, rows: int) -> list[Layer]:
    return [Layer(name="", role=role, sections=(rows,))]


def test_a_layer_of_a_large_vocabulary_is_tried_with_fewer_rows() -> None:
    tokens = SampleInput(args=(torch.tensor([[3, 70_001, 99_999]]),))
    table, head = nn.Embedding(100_001, 8), nn.Linear(8, 100_001).requires_grad_(False)
    state = torch.get_rng_state()
    block, layers, call = with_fewer_rows(table, vocabulary("vocabulary", 100_001), tokens, size=2)
    assert isinstance(block, nn.Embedding) and block.num_embeddings == 129 and layers[0].sections == (129,)
    assert call.args[0].tolist() == [[3, 70_001 % 129, 99_999 % 129]]
    small, layers, call = with_fewer_rows(head, vocabulary("head", 100_001), CALL, size=2)
    assert isinstance(small, nn.Linear) and small.out_features == 129 and layers[0].sections == (129,)
    assert call is CALL and not any(one.requires_grad for one in small.parameters())
    assert torch.equal(torch.get_rng_state(), state), "the script's numbers do not depend on what was tried"
    assert disagreement(table, vocabulary("vocabulary", 100_001), tokens, size=2, sequence=False) is None
    assert disagreement(head, vocabulary("head", 100_001), CALL, size=2, sequence=False) is None


def test_other_layers_are_tried_as_they_are() -> None:
    tokens = SampleInput(args=(torch.tensor([[3]]),))

    class Own(nn.Embedding):
        pass

    hooked = nn.Linear(8, 5000)
    hooked.register_forward_hook(lambda module, inputs, output: output)
    cases: list[tuple[nn.Module, Role, SampleInput]] = [
        (Own(5000, 8), "vocabulary", tokens),
        (nn.Embedding(5000, 8, padding_idx=4000), "vocabulary", tokens),
        (nn.Embedding(100, 8), "vocabulary", tokens),
        (hooked, "head", CALL),
        (nn.Linear(5000, 8), "row", CALL),
    ]
    for block, role, call in cases:
        layers = vocabulary(role, 5000)
        assert with_fewer_rows(block, layers, call, size=2)[0] is block
    layers = [Layer(name="up", role="column", sections=(32,))]
    assert with_fewer_rows(nn.Linear(8, 5000), layers, CALL, size=2)[1] is layers
