"""Checkpoints of adapters alone: any layout goes on from them, on the same base and on no other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from forked import WorkersFailed, World
from paceline.checkpoint.reader import find, open_checkpoint
from paceline.plan import Batch, Layout, Plan
from tuned_models import WORDS, adapted, loss_of

pytest.importorskip("peft")
BATCH = Batch(size=8, micro=2)
Change = Callable[[Any], None]


def nothing(model: Any) -> None:
    """No change."""


def tuned(
    worker: Any,
    steps: int,
    before: Change = nothing,
    halfway: Change = nothing,
    holds: Callable[[str], bool] = lambda name: False,
) -> list[float]:
    given = adapted()
    before(given)
    model = worker.prepare(given)
    trained = [one for name, one in model.named_parameters() if one.requires_grad or holds(name)]
    step = worker.stepper(model, worker.prepare(torch.optim.AdamW(trained, lr=0.1)), forward=loss_of)
    losses: list[float] = []
    for batch in worker.batches(TensorDataset(WORDS), epochs=3):
        losses.append(step(batch).item())
        if worker.step == 2:
            halfway(model)
        if worker.step == steps:
            break
    return losses


def move_base(model: Any) -> None:
    """What autograd does not see: the kind of change that merging an adapter is."""
    for name, one in model.named_parameters():
        if name.endswith("input_layernorm.weight") and not one.is_meta:
            local = one.to_local() if hasattr(one, "to_local") else one
            local.data.mul_(1.25)


def thaw_norms(model: Any) -> None:
    for name, one in model.named_parameters():
        one.requires_grad_(one.requires_grad or "norm" in name)


def other_base(model: Any) -> None:
    with torch.no_grad():
        model.base_model.model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3


class CodedLinear(nn.Linear):
    """A frozen layer in int8, as packages for quantised bases have it: codes as the weight, scales beside them."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        scale = layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        codes = (layer.weight.detach() / scale).round().to(torch.int8)
        self.weight: Any = nn.Parameter(codes, requires_grad=False)
        self.weight.scale = self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.float() * self.scale)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # pyright: ignore[reportUnknownMemberType]
        destination[f"{prefix}weight.scale"] = self.scale


def coded(model: Any) -> None:
    """Quantise layers that have no adapter."""
    for layer in model.base_model.model.model.layers:
        layer.mlp.up_proj = CodedLinear(layer.mlp.up_proj)
        layer.self_attn.k_proj = CodedLinear(layer.self_attn.k_proj)


def number_of(layout: Layout) -> int:
    return layout.workers_each * (layout.replicas if isinstance(layout.replicas, int) else 1)


def stored(world: World) -> Any:
    newest = find(world.run_dir / "checkpoints").newest
    assert newest is not None
    return open_checkpoint(newest, verified=True)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return World(tmp_path_factory.mktemp("one")).one_process(functools.partial(tuned, steps=4), Plan(batch=BATCH))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Layout(shard=2), Layout(tensor=2)),
        (Layout(tensor=2), Layout(stages=2)),
        (Layout(stages=2), Layout()),
        pytest.param(Layout(), Layout(shard=2), marks=pytest.mark.further),
        pytest.param(Layout(replicas=2), Layout(replicas=2), marks=pytest.mark.further),
        pytest.param(Layout(tensor=2, stages=2), Layout(shard=2, tensor=2), marks=pytest.mark.further),
    ],
    ids=str,
)
def test_any_layout_goes_on_from_adapters_alone(
    first: Layout, then: Layout, world: World, expected: list[float]
) -> None:
    begun = world(functools.partial(tuned, steps=2), number_of(first), Plan(layout=first, batch=BATCH))
    checkpoint = stored(world)
    of_model = [name for name in checkpoint.names if name.startswith("model.")]
    assert of_model
    assert all("lora_" in name or "modules_to_save" in name for name in of_model), of_model
    assert not any("lora_" in name for name in checkpoint.state["run"]["frozen"])
    assert len(checkpoint.state["run"]["frozen"]) == len(list(adapted().parameters())) - len(of_model)
    rest = world(functools.partial(tuned, steps=4), number_of(then), Plan(layout=then, batch=BATCH))
    torch.testing.assert_close([*begun[0], *rest[0]], expected, rtol=1e-4, atol=1e-5)


def test_another_base_is_refused_before_anything_is_trained(world: World) -> None:
    world(functools.partial(tuned, steps=2), 1, Plan(batch=BATCH))
    with pytest.raises(WorkersFailed, match=r"adapters alone.*are others now: .*layers\.1\.mlp\.up_proj") as failed:
        world(functools.partial(tuned, steps=4, before=other_base), 2, Plan(layout=Layout(shard=2), batch=BATCH))
    assert "up_proj.base_layer" not in str(failed.value)
    assert "(of " in str(failed.value)
    world(functools.partial(tuned, steps=4), 2, Plan(layout=Layout(shard=2), batch=BATCH))


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(stages=2), Layout()], ids=str)
def test_a_frozen_weight_that_was_changed_is_saved(layout: Layout, world: World) -> None:
    plan, workers = Plan(layout=layout, batch=BATCH), layout.workers_each
    whole = world.one_process(functools.partial(tuned, steps=6, halfway=move_base), Plan(batch=BATCH))
    begun = world(functools.partial(tuned, steps=3, halfway=move_base), workers, plan)
    found = {name for name in stored(world).names if name.endswith("input_layernorm.weight")}
    assert len(found) == 2, "both layers' norms, whole, and nothing else of the base"
    assert sum("lora_" not in name and name.startswith("model.") for name in stored(world).names) == 2 + 1
    then = world(functools.partial(tuned, steps=4), 1, Plan(batch=BATCH))  # it is what was prepared that differs
    assert len([name for name in stored(world).names if name.endswith("input_layernorm.weight")]) == 2
    last = world(functools.partial(tuned, steps=6), workers, plan)
    torch.testing.assert_close([*begun[0], *then[0], *last[0]], whole, rtol=1e-4, atol=1e-5)


def test_what_was_frozen_may_train_later(world: World) -> None:
    given = functools.partial(tuned, steps=2, holds=lambda name: True)
    world(given, 2, Plan(layout=Layout(shard=2), batch=BATCH))
    assert not [name for name in stored(world).names if name.startswith("model.") and "norm" in name]
    world(functools.partial(given, steps=4, before=thaw_norms), 1, Plan(batch=BATCH))
    norms = [name for name in stored(world).names if name.startswith("model.") and "norm" in name]
    assert len(norms) == 2 * 2 + 1, "two of each layer, and the last one"
    world(functools.partial(given, steps=5, before=thaw_norms), 1, Plan(batch=BATCH))


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (Layout(shard=2), Layout(tensor=2)),
        (Layout(stages=2), Layout(shard=2)),
        pytest.param(Layout(tensor=2), Layout(), marks=pytest.mark.further),
        pytest.param(Layout(), Layout(stages=2), marks=pytest.mark.further),
    ],
    ids=str,
)
def test_a_quantised_base_stays_whole_and_out_of_checkpoints(first: Layout, then: Layout, world: World) -> None:
    function = functools.partial(tuned, before=coded)
    expected = world.one_process(functools.partial(function, steps=4), Plan(batch=BATCH))
    begun = world(functools.partial(function, steps=2), number_of(first), Plan(layout=first, batch=BATCH))
    assert not [name for name in stored(world).names if "up_proj" in name or "k_proj" in name]
    rest = world(functools.partial(function, steps=4), number_of(then), Plan(layout=then, batch=BATCH))
    torch.testing.assert_close([*begun[0], *rest[0]], expected, rtol=1e-4, atol=1e-5)
