"""What frozen parameters, recompute of the model's own and other optimizers than Adam cost, in numbers worked out by
hand.
"""

from __future__ import annotations

import dataclasses

import pytest

from paceline.plan import Batch, Layout, Plan
from paceline.planner.axes import Axes
from paceline.planner.cluster import Cluster, catalogue
from paceline.planner.constants import Constants
from paceline.planner.memory import MemoryPrediction, predict_memory, state_bytes
from paceline.planner.model_costs import Attention, Block, Matmul, ModelCosts, transformer
from paceline.planner.predict import Case, Prediction, Workload
from paceline.planner.search import candidates
from paceline.planner.software import FUSED, paceline

IDEAL = Constants(link=1.0, network=1.0, latency=1e-6, passes=1.0, unfused=1.0, overlap=1.0, straggle=1e-4)
PRODUCT = Matmul(inputs=4096, outputs=4096, rows=1000.0)
TRAINED = Block(
    count=2, parameters=10**9, matmuls=(PRODUCT,) * 4, hidden=4096 * 1000, moved=1e6, kept=4e6, kept_split=2e6
)
FIXED = dataclasses.replace(
    TRAINED,
    frozen=10**9,
    matmuls=(dataclasses.replace(PRODUCT, needs_weights=False),) * 4,
)
BELOW = dataclasses.replace(
    FIXED,
    matmuls=(dataclasses.replace(PRODUCT, needs_weights=False, needs_inputs=False),) * 4,
    followed=0.0,
    kept=0.0,
    kept_split=0.0,
)


def case(*blocks: Block, axes: Axes | None = None, **changes: object) -> Case:
    device = dataclasses.replace(catalogue().device("h100"), memory_bandwidth=1e12, link=100e9)
    model = ModelCosts(blocks=blocks, sequence=1)
    axes = axes or Axes(replicas=4, zero=0)
    cluster = Cluster(device=device, hosts=1, devices_per_host=8, network=10e9)
    usual = Case(model=model, cluster=cluster, axes=axes, micro_batch=2, micro_batches=2, software=FUSED)
    return dataclasses.replace(usual, **changes)  # pyright: ignore[reportArgumentType]


def step(*blocks: Block, **given: object) -> Prediction:
    return Workload(case(*blocks, **given)).predict(IDEAL)  # pyright: ignore[reportArgumentType]


def memory(*blocks: Block, **given: object) -> MemoryPrediction:
    return predict_memory(case(*blocks, **given))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("zero", "of_trained", "of_frozen"),
    [(0, 4 + 4 + 8, 4), (1, 4 + 4 + 12 / 8, 4), (2, 4 + 14 / 8, 4), (3, 16 / 8, 4 / 8)],
)
def test_frozen_parameters_are_weights_alone(zero: int, of_trained: float, of_frozen: float) -> None:
    found = state_bytes(100.0, zero=zero, members=8, weight_bytes=4.0, gradient_bytes=4.0, frozen=90.0)
    assert found == pytest.approx(10 * of_trained + 90 * of_frozen)


@pytest.mark.parametrize(("each", "of_trained"), [(0.0, 8), (4.0, 12), (8.0, 16)])
def test_state_is_that_of_the_optimizer(each: float, of_trained: float) -> None:
    model = ModelCosts(blocks=(TRAINED,), sequence=1, optimizer_bytes=each)
    found = memory(TRAINED, model=model, software=paceline(compiles=True))
    assert found.parts["state"] == 2e9 * of_trained


def test_the_optimizers_step_moves_its_state() -> None:
    model = ModelCosts(blocks=(TRAINED,), sequence=1)
    plain = dataclasses.replace(model, optimizer_bytes=0.0)
    seconds = [step(TRAINED, model=one).parts["optimizer"] for one in (model, plain)]
    assert seconds == pytest.approx([2e9 * 32 / 1e12, 2e9 * 16 / 1e12])


def test_frozen_layers_cost_forward_and_the_gradient_of_their_inputs() -> None:
    trained, fixed, below = (step(one) for one in (TRAINED, FIXED, BELOW))
    assert fixed.parts["products"] / trained.parts["products"] == pytest.approx(2 / 3, rel=0.02)
    assert below.parts["products"] / trained.parts["products"] == pytest.approx(1 / 3, rel=0.02)
    assert below.parts["moves"] < fixed.parts["moves"] == trained.parts["moves"]
    assert fixed.parts["optimizer"] == below.parts["optimizer"] == 0.0


@pytest.mark.parametrize("axes", [Axes(replicas=4, zero=0), Axes(shard=4, zero=1), Axes(shard=4, zero=3)])
def test_gradients_of_frozen_layers_do_not_travel(axes: Axes) -> None:
    trained, half, none = (
        step(*blocks, axes=axes).parts["data"] for blocks in ((TRAINED, TRAINED), (TRAINED, FIXED), (FIXED, FIXED))
    )
    assert none < half < trained
    assert none == pytest.approx(trained * {0: 0.0, 1: 1 / 2, 3: 2 / 3}[axes.zero], rel=0.02, abs=1e-3)


def test_nothing_is_kept_or_repeated_below_the_first_trained_layer() -> None:
    assert memory(BELOW, recompute="full").parts["kept"] == 0.0
    assert step(BELOW, recompute="full").parts["recompute"] == 0.0
    assert step(FIXED, recompute="full").parts["recompute"] > 0


def test_recompute_of_the_models_own_costs_what_the_plans_costs() -> None:
    own = dataclasses.replace(
        TRAINED, kept=2 * 4096 * 1000.0, kept_split=0.0, working=4e6, working_split=2e6, again=1.0
    )
    by_model, by_plan = step(own), step(TRAINED, recompute="full")
    assert by_model.parts["recompute"] == pytest.approx(by_plan.parts["recompute"])
    kept, planned = memory(own), memory(TRAINED, recompute="full")
    assert kept.parts["kept"] == planned.parts["kept"]
    assert kept.parts["working"] == planned.parts["working"]
    assert step(own, recompute="full").parts["recompute"] == pytest.approx(2 * by_plan.parts["recompute"])


def test_model_flops_leave_out_gradients_that_nobody_needs() -> None:
    flops = [ModelCosts(blocks=(one,), sequence=1).model_flops(1) for one in (TRAINED, FIXED, BELOW)]
    assert flops == pytest.approx([3 * flops[2], 2 * flops[2], flops[2]])


def llama(kv_heads: int) -> ModelCosts:
    return transformer(layers=8, hidden=1024, heads=24, kv_heads=kv_heads, sequence=128, vocabulary=1000)


@pytest.mark.parametrize(("kv_heads", "sizes"), [(24, {1, 2, 4, 8}), (12, {1, 2, 4}), (6, {1, 2}), (1, {1, 2, 4, 8})])
def test_tensor_candidates_divide_the_heads_of_keys_and_values(kv_heads: int, sizes: set[int]) -> None:
    plan = Plan(batch=Batch(size=64, micro=1))
    found = candidates(plan, llama(kv_heads), workers=8, per_host=8)
    assert {one.layout.tensor for one in found} == sizes


def test_experts_are_spread_where_the_model_has_routed_ones() -> None:
    plan = Plan(layout=Layout(replicas=8), batch=Batch(size=64, micro=1))
    mixtral = transformer(layers=4, hidden=1024, heads=8, sequence=128, vocabulary=1000, experts=4, routed=2)
    assert {one.layout.experts for one in candidates(plan, mixtral, workers=8, per_host=8)} == {1, 2, 4}
    assert {one.layout.experts for one in candidates(plan, llama(24), workers=8, per_host=8)} == {1}


def test_a_group_of_experts_fills_the_device_as_its_members_do() -> None:
    one = Matmul(inputs=4096, outputs=4096, rows=8000.0)
    many = dataclasses.replace(one, groups=64)
    attention = Attention(heads=8, head_size=128, span=1000.0, kv_elements=2000.0)
    blocks = [dataclasses.replace(TRAINED, matmuls=(layer,), attention=attention, experts=64) for layer in (one, many)]
    whole, cut = (step(block).parts["products"] for block in blocks)
    spread = step(blocks[1], axes=Axes(experts=8, zero=0)).parts["products"]
    assert whole < cut
    assert whole <= spread < cut  # eight experts of a worker get the tokens of eight workers
