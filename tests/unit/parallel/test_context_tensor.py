"""Shared sequences beside layers that are cut: both are proved together, and what no rule knows is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from context_models import HUGGING_FACE, Own, build
from paceline.errors import PlanError
from paceline.parallel.context.find_plan import find_plan
from paceline.parallel.context.plan import ContextPlan
from paceline.parallel.tensor import tensor_context_ops
from paceline.parallel.tensor.find_plan import find_plan as find_layers
from paceline.parallel.tensor.split_shapes import CannotSplit
from paceline.parallel.tensor.split_tensor import SplitTensor, TokenSplitTensor, whole, wrap
from tensor_models import tokens


def shared(model: nn.Module, *, size: int = 2, cut_by: int = 2, sample: Any = None) -> ContextPlan:
    layers = find_layers(model, size=cut_by, sample=sample)
    assert layers.layers
    return find_plan(model, size=size, sample=sample, layers=layers)


@pytest.mark.parametrize(
    "kind",
    [
        "own",
        "nano",
        "time_first",
        "encoder",
        *[pytest.param(kind, marks=pytest.mark.thorough) for kind in ("gpt2", "llama_padded", "bert", "t5")],
    ],
)
def test_models_are_shared_and_cut_at_once_and_nothing_is_gathered(kind: str) -> None:
    if kind in HUGGING_FACE:
        pytest.importorskip("transformers")
    plan = shared(build(kind, torch.float64), sample=(tokens(12).T,) if kind == "time_first" else None)
    assert plan.attentions and not plan.operations and not plan.gathered


@pytest.mark.thorough
def test_a_workers_own_heads_go_round_a_ring_where_they_do_not_divide() -> None:
    assert shared(Own(num_key_heads=4)).attentions == {"heads": 2}  # two heads each
    assert shared(Own(num_key_heads=4), cut_by=4).attentions == {"ring": 2}  # one head each
    assert shared(Own(num_key_heads=4), size=3).attentions == {"ring": 2}


class Odd(Own):
    """Between cut layers, operations along features and along tokens that have no rule, and views of both in one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        x = x + self.blocks[0](x)
        batch, length, _ = x.shape
        h = self.up(x)
        h += h.mean(1, keepdim=True)
        joined = h.view(batch, length, 4, 16).reshape(batch, length * 4, 16).sin().view(batch, length, 64)
        h = joined + h * h[:, 0, None] + h.flip(-1) + h.roll(1, 1) + h.cumsum(1)
        return self.head(x + self.down(h.relu_()))


def test_operations_that_no_rule_knows_see_the_whole_along_their_own_cut() -> None:
    model = Odd()
    plan = find_plan(model, size=2, layers=find_layers(model, size=2, plan={"up": "column", "down": "row"}))
    assert {one.partition(" ")[0] for one in plan.operations} == {"cumsum", "flip", "roll"}


@pytest.mark.thorough
@pytest.mark.parametrize("broken", ["crossed", "under", "in_layer"])
def test_a_wrong_order_of_rules_leads_to_a_refusal(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "crossed":  # what crosses between cut layers loses its slices
        monkeypatch.setattr(tensor_context_ops, "_way", lambda _: None)
    elif broken == "under":  # heads are exchanged as if they were all there
        monkeypatch.setattr(
            tensor_context_ops.TensorContextOps, "along_tokens", lambda self, func, args, kwargs: func(*args, **kwargs)
        )
    else:
        monkeypatch.setattr(
            tensor_context_ops.TensorContextOps,
            "in_layer",
            lambda self, forward, args, kwargs: forward(*args, **kwargs),
        )
    with pytest.raises(PlanError, match=r"does not compute what it does on the whole|it cannot be tried"):
        shared(Own())


@pytest.mark.thorough
def test_a_tensor_is_cut_twice_along_two_dims_and_put_together_by_each_team() -> None:
    found: list[tuple[Any, ...]] = []
    real = tensor_context_ops.TensorContextOps.__init__

    def noted(self: tensor_context_ops.TensorContextOps, features: Any, tokens_: Any) -> None:
        real(self, features, tokens_)
        x = torch.arange(2.0 * 6 * 8).view(2, 6, 8)
        part = features.scatter(tokens_.scatter(x, dim=1, sections=(6,)), dim=2, sections=(8,)).clone()
        cut: Any = wrap(part, ops=features, dim=2, sections=(8,), site="a")
        wrap(cut, ops=tokens_, dim=1, sections=(6,), site="b")
        with pytest.raises(CannotSplit, match="in one dim"):
            wrap(
                wrap(x.clone(), ops=features, dim=1, sections=(6,), site="a"),
                ops=tokens_,
                dim=1,
                sections=(6,),
                site="b",
            )
        of_features, of_tokens = whole(cut, features), whole(cut, tokens_)
        found.append((x, cut.shape, whole(cut), of_features, of_tokens, whole(of_features), whole(of_tokens)))
        assert type(cut) is SplitTensor and cut.under is not None and cut.under.dim == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_context_ops.TensorContextOps, "__init__", noted)
        shared(Own())
    assert len(found) >= 4
    for x, shape, both, of_features, of_tokens, *again in found:
        assert shape == x.shape and type(both) is Tensor and torch.equal(both, x)
        assert isinstance(of_features, SplitTensor) and of_features.split_dim == 1
        assert isinstance(of_tokens, SplitTensor) and of_tokens.split_dim == 2
        assert all(torch.equal(one, x) for one in again) and not isinstance(of_features, TokenSplitTensor)
