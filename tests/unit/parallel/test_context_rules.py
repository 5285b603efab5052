"""What torch functions do on slices of the tokens, by emulated workers: results and gradients as on the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quick
from paceline.errors import PlanError
from paceline.parallel.context.collectives import EmulatedContextCollectives, emulated
from paceline.parallel.context.group_ops import ContextGroupOps
from paceline.parallel.context.op_rules import rule_of
from paceline.parallel.tensor.split_tensor import SplitTensor
from tensor_models import seeded

BATCH, LENGTH, WIDTH = 2, 13, 6
WEIGHT = seeded((10, WIDTH), torch.float64, 2)
LABELS = torch.randint(WIDTH, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
MASKED = LABELS.masked_fill(LABELS == 3, -100)
CLASS_WEIGHTS = torch.linspace(0.5, 2, WIDTH, dtype=torch.float64)
OTHER = seeded((BATCH, LENGTH, WIDTH), torch.float64, 6)
PICKED = torch.tensor([1, 5])


class Counting(ContextGroupOps):
    def __init__(self, group: EmulatedContextCollectives) -> None:
        super().__init__(group, rules=rule_of, kind="heads")
        self.is_told = False
        self.gathers: list[str] = []

    def without_rule(self, func: Any, args: Any, kwargs: Any, reason: Any) -> Any:
        self.gathers.append(f"{func}: {reason}")
        return super().without_rule(func, args, kwargs, reason)


def check(function: Callable[[Tensor], Tensor], size: int) -> list[str]:
    """Compare the function of slices with that of the whole; returns for what tokens were gathered."""
    x = seeded((BATCH, LENGTH, WIDTH), torch.float64).requires_grad_()

    def run(team: Counting | None) -> tuple[Tensor, Tensor]:
        out = function(x if team is None else team.sliced(x, dim=1, site="x"))
        shape = tuple(out.shape)
        whole = team.plain(out) if team is not None else out
        assert tuple(whole.shape) == shape  # a slice says the shape of the whole
        [grad] = torch.autograd.grad((whole * seeded(shape, torch.float64, 8)).sum(), [x])
        return whole.detach(), grad

    expected = run(None)

    def work(group: EmulatedContextCollectives) -> tuple[Tensor, Tensor, list[str]]:
        team = Counting(group)
        out, grad = run(team)
        return out, group.all_reduce(grad) / size, team.gathers

    everybody = emulated(size, work)
    for out, grad, _ in everybody:
        assert float((out - expected[0]).abs().max()) <= 1e-12
        assert float((grad - expected[1]).abs().max()) <= 1e-12
    return everybody[0][2]


class Passing(torch.autograd.Function):
    """Returns its input, as functions do that only want to hear of backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


def passed(x: Tensor) -> Tensor:
    out: Any = Passing.apply(x)
    assert type(out) is type(x)
    return out * 2


ON_SLICES: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, WEIGHT),
    "norm": lambda x: F.layer_norm(x, (WIDTH,)),
    "positions": lambda x: x + torch.arange(x.shape[1])[:, None],
    "heads": lambda x: x.view(BATCH, -1, 2, 3).transpose(1, 2) * 2,
    "all_tokens_in_rows": lambda x: F.linear(x.reshape(-1, WIDTH), WEIGHT).view(*x.shape[:-1], 10),
    "passed_by_a_function": passed,
    "viewed_as_another": lambda x: x.view(BATCH, LENGTH, 2, 3).view_as(x) * x.view_as(OTHER),
    "flattened": lambda x: (x.flatten(0, 1) * 2).unflatten(0, (BATCH, LENGTH)),
    "all_but_the_last": lambda x: x[:, :-1] * x[:, 1:],
    "a_range": lambda x: x.narrow(1, 3, 8) * x[:, -8:, :],
    "first_token": lambda x: x[:, 0] * 2,
    "last_token": lambda x: x[:, -1, 1:4],
    "token_of_a_sample": lambda x: x[1, 7],
    "selected": lambda x: x.select(1, 12),
    "mean_over_tokens": lambda x: x.mean(1),
    "mean_of_all": lambda x: (x**2).mean(),
    "sum_of_all": lambda x: x.sum(),
    "sum_kept": lambda x: x - x.sum((0, 1), keepdim=True),
    "per_token": lambda x: x.mean(-1, keepdim=True) + x.amax(-1, keepdim=True),
    "topk": lambda x: x.topk(2, dim=-1).values,
    "picked": lambda x: x.log_softmax(-1).gather(-1, LABELS[..., None]).mean(),
    "empty_cache": lambda x: torch.cat([torch.tensor([]), x], dim=1) * 2,
    "features_joined": lambda x: torch.cat((x, OTHER), -1),
    "scores": lambda x: torch.softmax(x @ x.transpose(1, 2), -1) @ x,
    "einsum": lambda x: torch.einsum("bic,bjc->bij", x, x * 2),
    "einsum_back": lambda x: torch.einsum("bij,bjc->bic", torch.einsum("bic,bjc->bij", x, x), x),
    "cross_entropy": lambda x: F.cross_entropy(x.view(-1, WIDTH), LABELS.view(-1)),
    "cross_entropy_2d": lambda x: F.cross_entropy(x.transpose(1, 2), MASKED, label_smoothing=0.1),
    "cross_entropy_weights": lambda x: F.cross_entropy(x.flatten(0, 1), MASKED.flatten(), CLASS_WEIGHTS),
    "cross_entropy_sum": lambda x: F.cross_entropy(x.flatten(0, 1), MASKED.flatten(), reduction="sum"),
    "cross_entropy_none": lambda x: F.cross_entropy(x.flatten(0, 1), MASKED.flatten(), reduction="none") * 2,
    "cross_entropy_shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, WIDTH), LABELS[:, 1:].reshape(-1)),
    "nll": lambda x: F.nll_loss(x.log_softmax(-1).flatten(0, 1), LABELS.flatten()),
    "mse": lambda x: F.mse_loss(x, OTHER),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, OTHER.sigmoid(), reduction="sum"),
}
GATHERED: dict[str, Callable[[Tensor], Tensor]] = {
    "flipped": lambda x: x.flip(1),
    "rolled": lambda x: x.roll(1, 1),
    "cumsum": lambda x: x.cumsum(1),
    "convolution": lambda x: F.conv1d(x.transpose(1, 2), WEIGHT[:, :, None].expand(10, WIDTH, 3)),
    "by_a_tensor": lambda x: x[:, PICKED],
    "every_other": lambda x: x[:, ::2],
    "one_more_token": lambda x: torch.cat((x, x[:, :1]), 1),
    "split": lambda x: x.split(5, 1)[1],
    "softmax_over_tokens": lambda x: x.softmax(1),
    "windows": lambda x: x[:, :12].reshape(BATCH, 3, 4, WIDTH).sum(2),
    "written_into": lambda x: torch.zeros(BATCH, LENGTH, WIDTH, dtype=x.dtype).index_copy(1, PICKED, x[:, PICKED]),
    "soft_targets": lambda x: F.cross_entropy(x.flatten(0, 1), OTHER.flatten(0, 1).softmax(-1)),
}


@pytest.mark.parametrize("size", quick.some([2, 3, 4], step=3))
@pytest.mark.parametrize("name", list(ON_SLICES))
def test_on_slices_without_a_gather(name: str, size: int) -> None:
    assert check(ON_SLICES[name], size) == []


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", list(GATHERED))
def test_what_needs_all_tokens_gathers_them_and_is_right(name: str, size: int) -> None:
    gathers = check(GATHERED[name], size)
    assert gathers or (name == "windows" and size == 2)


def test_a_warning_says_once_what_gathers_and_why() -> None:
    def work(group: EmulatedContextCollectives) -> None:
        team = ContextGroupOps(group, rules=rule_of, kind="heads")
        x = team.sliced(torch.ones(BATCH, LENGTH, WIDTH), dim=1, site="x")
        for _ in range(2):
            x.flip(1)

    with pytest.warns(UserWarning, match=r"flip needs the whole sequence \(.*(2, 13, 6)") as told:
        emulated(1, work)
    assert len(told) == 1


def test_a_change_in_place_that_cannot_be_followed_is_refused_with_the_remedy() -> None:
    def work(group: EmulatedContextCollectives) -> None:
        x = ContextGroupOps(group, rules=rule_of, kind="heads").sliced(torch.ones(2, 8, 4), dim=1, site="block.0")
        x[:, ::2] = 0

    with pytest.raises(PlanError, match=r"setitem changes a tensor in place.*block\.0.*Layout\(context=1\)"):
        emulated(2, work)


def test_fewer_tokens_than_workers_stay_whole() -> None:
    def work(group: EmulatedContextCollectives) -> bool:
        team = ContextGroupOps(group, rules=rule_of, kind="heads")
        return isinstance(team.sliced(torch.ones(2, 3, 4), dim=1, site="x"), SplitTensor)

    assert emulated(3, work) == [True] * 3
    assert emulated(4, work) == [False] * 4
