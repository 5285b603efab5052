"""Plans for shared sequences: what is found, what is refused, and that a wrong one cannot get through."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from context_models import Own, TimeFirst, build
from paceline.errors import PlanError
from paceline.parallel import trial_types
from paceline.parallel.context import collectives, verify
from paceline.parallel.context.apply import apply_plan
from paceline.parallel.context.collectives import EmulatedContextCollectives, emulated
from paceline.parallel.context.find_plan import find_plan
from paceline.parallel.context.plan import ContextPlan
from paceline.parallel.sample_input import SampleInput
from paceline.parallel.tensor import gradient_sketch
from paceline.parallel.tensor.random_weights import RandomWeights
from paceline.parallel.tensor.split_tensor import SplitTensor
from tensor_models import TOKENS, SkipMLP, tokens


@pytest.mark.thorough
def test_heads_are_shared_where_they_divide_and_keys_go_round_a_ring_where_not() -> None:
    assert find_plan(build("own", torch.float32), size=2).attentions == {"heads": 2}
    assert find_plan(build("own", torch.float32), size=3).attentions == {"ring": 2}
    assert find_plan(build("own", torch.float32), size=2, kind="ring").attentions == {"ring": 2}
    with pytest.raises(PlanError, match=r"kind='heads' needs heads that divide among 3 workers.*kind='auto'"):
        find_plan(build("own", torch.float32), size=3, kind="heads")
    with pytest.raises(PlanError, match="kind='rings': it must be 'auto', 'heads' or 'ring'"):
        find_plan(build("own", torch.float32), size=2, kind="rings")  # type: ignore  # that is refused
    with pytest.raises(PlanError, match=r"context=0\): it must be at least 1"):
        find_plan(build("own", torch.float32), size=0)


def test_written_out_attention_is_shared_by_rows() -> None:
    plan = find_plan(build("nano", torch.float32), size=2)
    assert plan.attentions == {"rows": 4}  # two products in each of two blocks
    assert not plan.operations and not plan.gathered


def test_a_model_with_tokens_first_is_recognised_with_and_without_a_sample() -> None:
    plan = find_plan(TimeFirst(), size=4)
    assert plan.dim == -3 and plan.attentions == {"heads": 2} and plan.embeddings == ("embed",)
    given = find_plan(TimeFirst(), size=2, sample=(tokens(8).T,))
    assert given.dim == -3


def test_the_report_says_what_is_sliced_and_how_attention_is_shared() -> None:
    text = str(find_plan(build("nano", torch.float32), size=2))
    assert "context=2: tokens are sliced in dim -2 of 2 blocks" in text
    assert "4 x rows" in text and "embedding: wte" in text


def test_a_model_without_attention_is_refused_with_the_remedy() -> None:
    with pytest.raises(PlanError, match=r"SkipMLP: no attention over its tokens.*Layout\(replicas=2\)"):
        find_plan(SkipMLP(), size=2)


class Mixing(nn.Module):
    """Attention, and a module that mixes tokens by an operation without a rule."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.mixer, self.own = mixer, Own()

    def forward(self, idx: Tensor) -> Tensor:
        return self.own.head(self.mixer(self.own.blocks[0](self.own.wte(idx))))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Routed(nn.Module):
    """Each token goes to one of two experts; `by_where`: torch.where finds them."""

    def __init__(self, *, by_where: bool = False) -> None:
        super().__init__()
        self.by_where = by_where
        self.gate, self.experts = nn.Linear(32, 2), nn.ModuleList(nn.Linear(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 32)
        choice, out = self.gate(rows), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            is_chosen = choice.argmax(-1) == number
            chosen = torch.where(is_chosen)[0] if self.by_where else is_chosen.nonzero().squeeze(1)
            out = out.index_add(0, chosen, expert(rows[chosen]) * choice.softmax(-1)[chosen, number, None])
        return out.view(x.shape)


def test_a_module_that_needs_all_tokens_gets_them_and_the_plan_says_so() -> None:
    for mixer in (Convolution(), Routed(), Routed(by_where=True)):
        plan = find_plan(Mixing(mixer), size=2)
        assert plan.gathered == ("mixer",)
        assert "whole: mixer" in str(plan)


def test_a_module_named_token_by_token_gets_its_tokens_only_if_that_is_true() -> None:
    plan = find_plan(Mixing(Routed()), size=2, tokenwise=("mixer",))
    assert plan.tokenwise == ("mixer",) and not plan.gathered
    wrong = find_plan(Mixing(Convolution()), size=2, tokenwise=("mixer",))
    assert wrong.tokenwise == () and wrong.gathered == ("mixer",)
    with pytest.raises(PlanError, match="tokenwise='mixers' names no module of Mixing"):
        find_plan(Mixing(Routed()), size=2, tokenwise=("mixers",))


def test_a_change_in_place_of_some_tokens_is_refused_with_the_remedy() -> None:
    class Writing(Own):
        def forward(self, idx: Tensor) -> Tensor:
            x = self.wte(idx).clone()
            x[:, ::2] = 0
            return self.head(self.blocks[0](x))

    with pytest.raises(PlanError, match=r"Writing: .*in place.*Layout\(context=1\)"):
        find_plan(Writing(), size=2)


@pytest.mark.thorough
@pytest.mark.parametrize("broken", ["heads", "slice", "sum"])
def test_a_wrong_rule_leads_to_a_refusal(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken == "heads":
        right = collectives.by_tokens
        monkeypatch.setattr(collectives, "by_tokens", lambda *a, **k: right(*a, **k).roll(1, -2))
    elif broken == "slice":
        monkeypatch.setattr(collectives, "slice_from", lambda whole, *, dim, ranges: _first(whole, dim, ranges))
    else:  # gradients of what was gathered are not summed
        right = collectives.gathered
        monkeypatch.setattr(
            collectives, "gathered", lambda tensor, *a, **k: right(tensor, *a, **k).detach() + 0 * tensor.sum()
        )
    with pytest.raises(PlanError, match=r"does not compute what it does on the whole \(.* off by"):
        find_plan(build("own" if broken != "sum" else "nano", torch.float32), size=2)


@pytest.mark.thorough
@pytest.mark.parametrize(("is_wrong", "tried"), [(False, 1), (True, 2)])
def test_large_models_are_tried_in_single_precision_and_what_disagrees_in_double(
    is_wrong: bool, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_types, "MOST_AT_FIRST", 4)
    types: list[torch.dtype] = []
    run = verify.try_plan

    def noted(reference: verify.WholeModelRun, *args: Any) -> verify.ContextTrial:
        types.append(next(reference.weights.whole.parameters()).dtype)
        found = run(reference, *args)
        is_rounded = is_wrong and types[-1] is torch.float32
        return dataclasses.replace(found, disagreement="it was rounded") if is_rounded else found

    monkeypatch.setattr("paceline.parallel.context.find_plan.try_plan", noted)
    assert find_plan(build("own", torch.bfloat16), size=2).attentions == {"heads": 2}
    assert list(dict.fromkeys(types)) == [torch.float32, torch.float64][:tried]


def test_a_refusal_in_both_precisions_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_types, "MOST_AT_FIRST", 4)
    with pytest.raises(PlanError, match="no attention over its tokens was found"):
        find_plan(SkipMLP(), size=2)
    run = verify.run_whole

    def single_only(model: nn.Module, samples: Any, dtype: torch.dtype) -> verify.WholeModelRun:
        if dtype is torch.float64:
            raise RuntimeError("no kernel for double")
        return run(model, samples, dtype)

    monkeypatch.setattr("paceline.parallel.context.find_plan.run_whole", single_only)
    with pytest.raises(PlanError, match="no attention over its tokens was found"):
        find_plan(SkipMLP(), size=2)


def test_nothing_of_a_trial_stays_in_memory() -> None:
    gc.collect()
    gc.disable()
    try:
        seen: list[weakref.ref[Any]] = []
        made = RandomWeights.copy

        def noted(self: RandomWeights) -> nn.Module:
            copied = made(self)
            seen.extend(map(weakref.ref, copied.modules()))
            return copied

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RandomWeights, "copy", noted)
            find_plan(build("own", torch.float32), size=2)
        assert len(seen) > 2 and [one() for one in seen] == [None] * len(seen)
    finally:
        gc.enable()


def _first(whole: Tensor, dim: int, ranges: Any) -> Tensor:
    """The first tokens, for every caller."""
    return whole.narrow(dim, 0, sum(stop - first for first, stop in ranges))


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    model = build("own", torch.float32)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    state = torch.get_rng_state()
    find_plan(model, size=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and all(one.grad is None for one in model.parameters())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not any("forward" in vars(one) or one._forward_pre_hooks for one in model.modules())


def test_trials_share_the_weights_of_one_copy() -> None:
    whole = verify.run_whole(build("own", torch.float32), [SampleInput(args=(tokens(8),))], torch.float64)
    places = [[one.data_ptr() for one in model.parameters()] for model in (whole.weights.whole, whole.weights.copy())]
    assert places[0] == places[1] and all(one.grad is None for one in whole.weights.whole.parameters())


class Wide(nn.Module):
    """Attention over blocks that are large beside their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(60))

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.table(numbers)
        x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], is_causal=True)[:, 0]
        for block in self.blocks:
            x = x + 0.1 * torch.tanh(block(x))
        return x


def own_mib() -> float:
    """What memory of its own this process has: pages that are mapped again and again are none."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def test_a_trial_takes_the_memory_of_a_few_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model, taken = Wide(), list[float]()
    whole_mib = sum(8 * one.numel() for one in model.parameters()) / 2**20
    sample = (torch.randint(TOKENS, (2, 8), generator=torch.Generator().manual_seed(0)),)
    find_plan(model, size=2, sample=sample)  # what a first trial brings is there
    sketch = gradient_sketch.sketch

    def noted(gradient: Tensor) -> Any:
        taken.append(own_mib())
        return sketch(gradient)

    monkeypatch.setattr(gradient_sketch, "sketch", noted)
    before = own_mib()
    assert find_plan(model, size=2, sample=sample).attentions
    assert len(taken) >= 3 * 121 and max(taken) - before < 0.4 * whole_mib, f"{max(taken) - before} of {whole_mib} MiB"


def test_outputs_are_whole_without_gradients_and_slices_with_them() -> None:
    model = build("own", torch.float64)
    plan = find_plan(model, size=2)
    expected = model(tokens(9)).detach()

    def work(group: EmulatedContextCollectives) -> tuple[bool, bool, bool]:
        own = copy.deepcopy(model, {id(one): one for one in model.parameters()})
        shared = apply_plan(own, plan, group)
        sliced = own(tokens(9))
        is_sliced = isinstance(sliced, SplitTensor) and sliced.shape == expected.shape
        is_equal = bool(torch.allclose(shared.whole({"out": [sliced]})["out"][0], expected, atol=1e-12))
        with torch.no_grad():
            whole = own(tokens(9))
        return (
            is_sliced,
            is_equal,
            not isinstance(whole, SplitTensor) and bool(torch.allclose(whole, expected, atol=1e-12)),
        )

    assert emulated(2, work) == [(True, True, True)] * 2


class Counted(nn.Embedding):
    """Positions that it counts itself, from the shape of its input."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(torch.arange(input.shape[1]))


class Encoder(nn.Module):
    """One layer of torch's, with a learned mask, and heads that 2 workers cannot share."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(TOKENS, 24), Counted(64, 24)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(24, 3, 48, batch_first=True)])
        self.near = nn.Parameter(torch.randn(64, 64))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx) + self.place(idx)
        return self.layers[0](x, src_mask=self.near[: idx.shape[1], : idx.shape[1]])


def test_embeddings_that_count_and_masks_that_learn_are_shared_and_agree() -> None:
    plan = find_plan(Encoder(), size=2)
    assert plan.attentions == {"ring": 1}
    assert set(plan.embeddings) == {"embed", "place"}
    assert not plan.operations and not plan.gathered


def test_a_model_that_runs_in_no_precision_that_can_be_tried_is_refused() -> None:
    class Picky(Own):
        def forward(self, idx: Tensor) -> Tensor:
            if self.head.weight.dtype is not torch.bfloat16:
                raise RuntimeError("only bf16 is known here")
            return super().forward(idx)

    with pytest.raises(PlanError, match=r"Picky has to be tried in double.*only bf16 is known.*sample=\(x,\)"):
        find_plan(Picky().bfloat16(), size=2, sample=(tokens(8),))


def test_a_sample_that_proves_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match=r"attention over 4 tokens, too few to verify a plan for 4 workers.*at least 8"):
        find_plan(build("own", torch.float32), size=4, sample=(tokens(4),))


def test_a_micro_batch_with_fewer_tokens_than_workers_is_right() -> None:
    model = build("own", torch.float64)
    plan = find_plan(model, size=4)
    loss = F.cross_entropy(model(tokens(3)).view(-1, TOKENS), tokens(3, seed=6).view(-1))
    expected = torch.autograd.grad(loss, list(model.parameters()))

    def work(group: EmulatedContextCollectives) -> bool:
        own = copy.deepcopy(model, {id(one): one for one in model.parameters()})
        apply_plan(own, plan, group)
        out = F.cross_entropy(own(tokens(3)).view(-1, TOKENS), tokens(3, seed=6).view(-1))
        found = torch.autograd.grad(out, list(own.parameters()))
        mean = [group.all_reduce(one) / 4 for one in found]
        return all(torch.allclose(a, b, atol=1e-12) for a, b in zip(mean, expected, strict=True))

    assert emulated(4, work) == [True] * 4


def test_a_plan_for_other_workers_or_another_model_is_refused() -> None:
    plan = find_plan(build("own", torch.float32), size=2)
    with pytest.raises(PlanError, match="the plan is for 2 workers, but the group has 3"):
        emulated(3, lambda group: apply_plan(build("own", torch.float32), plan, group))
    other = dataclasses.replace(plan, blocks=("layers.0",))
    with pytest.raises(PlanError, match=r"the plan names layers\.0, which Own does not have"):
        emulated(2, lambda group: apply_plan(build("own", torch.float32), other, group))


def test_one_worker_shares_with_nobody() -> None:
    plan: ContextPlan = find_plan(build("own", torch.float32), size=1)
    assert plan.size == 1 and plan.attentions
