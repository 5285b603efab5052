"""Attention over slices, by emulated workers, against torch's own on the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import quick
from paceline.parallel.context import ring_attention
from paceline.parallel.context.collectives import EmulatedContextCollectives, emulated
from paceline.parallel.context.group_ops import AttentionKind, ContextGroupOps
from paceline.parallel.context.op_rules import rule_of
from paceline.parallel.tensor.split_tensor import SplitTensor
from tensor_models import seeded

BATCH, WIDTH = 2, 4


class Counting(ContextGroupOps):
    """Notes which kinds were used, and operations for which tokens were gathered."""

    def __init__(self, group: EmulatedContextCollectives, kind: AttentionKind) -> None:
        super().__init__(group, rules=rule_of, kind=kind)
        self.is_told = False
        self.kinds: list[str] = []
        self.gathers = 0

    def attended(self, kind: str, length: int) -> None:
        self.kinds.append(kind)

    def without_rule(self, func: Any, args: Any, kwargs: Any, reason: Any) -> Any:
        self.gathers += 1
        return super().without_rule(func, args, kwargs, reason)


def both(
    size: int,
    heads: tuple[int, int],
    lengths: tuple[int, int],
    kind: AttentionKind,
    mask: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[list[Tensor], list[list[Tensor]], list[Counting]]:
    """Result and gradients of the whole, and of each worker: mean gradients."""
    shapes = [(BATCH, heads[0], lengths[0], WIDTH)] + [(BATCH, heads[1], lengths[1], WIDTH)] * 2
    leaves = [seeded(shape, dtype, seed).requires_grad_() for seed, shape in enumerate(shapes)]
    if mask is not None and mask.requires_grad:
        leaves.append(mask)
    weights = seeded((BATCH, heads[0], lengths[0], WIDTH), dtype, 9)

    def run(team: ContextGroupOps | None) -> list[Tensor]:
        given = [one if team is None else team.sliced(one, dim=2, site="q") for one in leaves[:3]]
        if heads[0] != heads[1]:
            options["enable_gqa"] = True
        out = F.scaled_dot_product_attention(*given, attn_mask=mask, **options)
        if team is not None:
            assert isinstance(out, SplitTensor)
            out = team.plain(out)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]

    expected = run(None)
    teams: list[Counting] = []

    def work(group: EmulatedContextCollectives) -> list[Tensor]:
        team = Counting(group, kind)
        teams.append(team)
        out, *grads = run(team)
        return [out, *(group.all_reduce(one) / size for one in grads)]

    return expected, emulated(size, work), teams


def close(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> bool:
    return all(float((a - b).detach().abs().max()) <= tolerance for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", ["heads", "ring"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", quick.some([8, 16, 17, 23], step=2))
@pytest.mark.parametrize("size", quick.some([2, 3, 4], step=2))
def test_any_length_and_number_of_workers(size: int, length: int, is_causal: bool, kind: AttentionKind) -> None:
    expected, everybody, teams = both(size, (12, 12), (length, length), kind, is_causal=is_causal)
    assert all(close(found, expected) for found in everybody)
    assert {one for team in teams for one in team.kinds} == {kind}


@pytest.mark.parametrize(
    ("heads", "used"), [((8, 2), "heads"), ((8, 1), "heads"), ((12, 3), "heads"), ((6, 2), "ring")]
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_fewer_heads_of_keys(heads: tuple[int, int], used: str, is_causal: bool) -> None:
    for kind in ("heads", "ring"):
        expected, everybody, teams = both(4, heads, (13, 13), kind, is_causal=is_causal)
        assert all(close(found, expected) for found in everybody)
        assert {one for team in teams for one in team.kinds} == {used if kind == "heads" else "ring"}


@pytest.mark.parametrize("kind", ["heads", "ring"])
@pytest.mark.parametrize("shape", [(13, 9), (1, 1, 13, 9), (BATCH, 1, 13, 9), (BATCH, 1, 1, 9), (1, 4, 13, 9)])
def test_masks_of_all_shapes_and_cross_attention(shape: tuple[int, ...], kind: AttentionKind) -> None:
    added = seeded(shape, torch.float64, 3)
    shown = added > -0.5
    shown[..., 0] = True
    for mask in (added, shown):
        expected, everybody, _ = both(2, (4, 4), (13, 9), kind, mask)
        assert all(close(found, expected) for found in everybody)


def test_a_query_that_meets_no_key_is_nought_in_a_ring() -> None:
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    mask[3] = False
    expected, everybody, _ = both(2, (3, 3), (8, 8), "heads", mask)
    assert all(close(found, expected) for found in everybody)
    assert not everybody[0][0][:, :, 3].any()


@pytest.mark.parametrize("kind", ["heads", "ring"])
@pytest.mark.parametrize("shape", [(1, 4, 13, 9), (13, 9), (BATCH, 1, 1, 9)])
def test_a_learned_mask_gets_its_gradient_from_all_workers(shape: tuple[int, ...], kind: AttentionKind) -> None:
    mask = seeded(shape, torch.float64, 3).requires_grad_()
    expected, everybody, teams = both(2, (4, 4), (13, 9), kind, mask)
    assert len(expected) == 5
    assert all(close(found, expected) for found in everybody)
    assert not any(team.gathers for team in teams)


def test_bf16_in_a_ring_is_as_close_as_torch_is() -> None:
    exact, _, _ = both(2, (3, 3), (32, 32), "heads", is_causal=True)
    rounded, everybody, _ = both(2, (3, 3), (32, 32), "heads", dtype=torch.bfloat16, is_causal=True)
    own = max(float((a.double() - b).abs().max()) for a, b in zip(rounded, exact, strict=True))
    for found in everybody:
        assert found[0].dtype == torch.bfloat16
        assert max(float((a.double() - b).abs().max()) for a, b in zip(found, exact, strict=True)) <= 3 * own


@pytest.mark.parametrize("kind", ["heads", "ring"])
def test_dropout_is_the_same_forward_and_backward_and_keeps_the_mean(kind: AttentionKind) -> None:
    """The result is linear in the values, so grad(values) . values is the result that the loss saw."""
    value = torch.ones(1, 4, 64, 2, dtype=torch.float64, requires_grad=True)
    query = seeded((1, 4, 64, 2), torch.float64)
    weights = seeded((1, 4, 64, 2), torch.float64, 4)

    def work(group: EmulatedContextCollectives) -> tuple[Tensor, Tensor]:
        team = Counting(group, kind)
        q, k, v = (team.sliced(one, dim=2, site="q") for one in (query, query, value))
        out = team.plain(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5))
        [grad] = torch.autograd.grad((out * weights).sum(), [value])
        return out.detach(), group.all_reduce(grad) / 2

    torch.manual_seed(3)
    for out, grad in emulated(2, work):
        assert float((grad * value.detach()).sum()) == pytest.approx(float((out * weights).sum()), rel=1e-9)
        assert float(out.std()) > 0.05
        assert float(out.mean()) == pytest.approx(1.0, abs=0.05)
        assert not torch.equal(out[:, :, :32], out[:, :, 32:])  # workers draw other numbers


@pytest.mark.thorough
@pytest.mark.parametrize("is_causal", [False, True])
def test_gradients_of_a_ring_with_dropout_are_those_of_what_it_computes(is_causal: bool) -> None:
    leaves = [seeded((1, heads, 6, 2), torch.float64, heads).requires_grad_() for heads in (6, 3, 3)]
    mask = seeded((6, 6), torch.float64, 7).requires_grad_()

    def work(group: EmulatedContextCollectives) -> bool:
        team = Counting(group, "ring")

        def attended(*tensors: Tensor) -> Tensor:
            torch.manual_seed(3)  # the same noise each time
            *given, added = tensors
            q, k, v = (team.sliced(one * 1, dim=2, site="q") for one in given)
            options: Any = {"is_causal": True} if is_causal else {"attn_mask": added}
            return team.plain(F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, enable_gqa=True, **options))

        return torch.autograd.gradcheck(attended, [*leaves, mask])

    assert emulated(1, work) == [True]


@pytest.mark.parametrize("size", [2, 4])
def test_causal_work_is_the_same_for_all_workers_of_a_ring(size: int) -> None:
    """Scores that are computed: those of hidden blocks are not, and half of all blocks are hidden."""
    computed: dict[int, int] = {}

    class Measuring(ring_attention._Ring):
        def scores(self, query: Tensor, key: Tensor, mask: Tensor | None, block: Any) -> Tensor:
            found = super().scores(query, key, mask, block)
            computed[self.group.index] = computed.get(self.group.index, 0) + found.numel()
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring_attention, "_Ring", Measuring)
        expected, everybody, _ = both(size, (3, 3), (64, 64), "ring", is_causal=True)
    assert all(close(found, expected) for found in everybody)
    assert len(set(computed.values())) == 1
    whole = BATCH * 3 * 64 * 64 * 2  # forward, and again in backward
    assert sum(computed.values()) <= whole * (0.5 + 0.5 / size)
