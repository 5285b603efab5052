"""Expert parallel: experts split among workers, threads of this process: what is found, and that numbers stay."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from expert_models import ListedExperts, MoeNet, RoutedBlock, StackedExperts
from paceline.errors import PlanError, SyncError
from paceline.parallel.expert.apply import ExpertParallelModel, distribute_experts
from paceline.parallel.expert.find_experts import find_experts
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate
from paceline.parallel.torch_functions import on_parts


class Exchange:
    """One thread's end of an exchange between threads."""

    is_still = False

    def __init__(self, group: EmulatedGroup) -> None:
        self.index, self.size, self.calls = group.index, group.size, 0
        self._group = group

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        self.calls += 1
        parts = self._group.all_gather(torch.tensor(sent)), self._group.all_gather(rows)
        came = [rows.split(counts.tolist())[self.index] for counts, rows in zip(*parts, strict=True)]
        assert [len(one) for one in came] == list(received)
        return torch.cat(came)


Result = tuple[ExpertParallelModel, nn.Module, Tensor, Exchange]


def each_on(size: int, model: nn.Module, inputs: Sequence[Tensor], run: Any = None) -> list[Result]:
    """One model's experts on so many workers, each with an input of its own; their losses went backward."""

    def work(group: EmulatedGroup) -> Result:
        mine, exchange = copy.deepcopy(model), Exchange(group)
        distributed = distribute_experts(mine, find_experts(mine, size=size), exchange)
        out = (run or (lambda one, x: one(x)))(mine, inputs[group.index])
        loss_of(mine, out).backward()
        return distributed, mine, out.detach(), exchange

    return emulate(size, work)


def loss_of(model: Any, out: Tensor) -> Tensor:
    return out.square().mean() + (model.auxiliary if isinstance(model, MoeNet) else 0.0)


def assert_same(results: list[Result], model: nn.Module, inputs: Sequence[Tensor]) -> None:
    """Outputs are those of the whole model; gradients are its sums over all inputs."""
    for x, (_, _, out, _) in zip(inputs, results, strict=True):
        whole = model(x)
        torch.testing.assert_close(out, whole.detach())
        loss_of(model, whole).backward()
    distributed = results[0][0]
    for name, parameter in model.named_parameters():
        here = [dict(one.named_parameters())[name] for _, one, _, _ in results]
        grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in here if not one.is_meta]
        assert len(grads) == (1 if name in distributed.owners else len(results)), name
        with on_parts():
            found = torch.cat(grads) if name in distributed.splits else torch.stack(grads).sum(0)
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, expected, msg=lambda text, name=name: f"{name}: {text}")


def words(size: int) -> list[Tensor]:
    torch.manual_seed(5)
    return [torch.randint(48, (1 + number, 8)) for number in range(size)]


@pytest.fixture(autouse=True)
def _doubles() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # each of the workers' threads would have as many beside it
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("size", [2, 4])
def test_outputs_and_gradients_are_those_of_the_whole_model(size: int) -> None:
    model, inputs = MoeNet(drop=0.0), words(size)
    assert_same(each_on(size, model, inputs), model, inputs)


@pytest.mark.parametrize("favours", [0, 3])
def test_experts_that_get_no_token_keep_nobody_waiting(favours: int) -> None:
    """All tokens go to one worker: the others make nothing, and still pass all gradients on."""
    model, inputs = MoeNet(drop=0.0, favours=favours), words(4)
    assert_same(each_on(4, model, inputs), model, inputs)


@pytest.mark.parametrize("is_frozen", [lambda name: "experts" in name, lambda name: "experts" not in name])
def test_with_a_part_of_the_model_frozen_all_go_backward_alike(is_frozen: Any) -> None:
    model, inputs = MoeNet(drop=0.0, favours=1), words(2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_frozen(name))
    assert_same(each_on(2, model, inputs), model, inputs)


def test_blocks_are_recomputed_at_one_place_of_backward_on_workers_with_and_without_tokens() -> None:
    model, inputs = MoeNet(drop=0.0, favours=2), words(2)

    def run(one: Any, x: Tensor) -> Tensor:
        hidden = one.words(x)
        for block in one.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return one.head(one.norm(hidden))

    results = each_on(2, model, inputs, run)
    for (_, one, out, _), x in zip(results, inputs, strict=True):
        torch.testing.assert_close(out, run(model, x).detach())
        assert all(p.grad is not None for p in one.blocks[0].router.parameters())  # pyright: ignore  # torch knows modules of lists as Module only


def test_a_token_travels_once_to_a_worker_with_several_of_its_experts() -> None:
    counted: list[int] = []

    class Counting(Exchange):
        def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
            if self.calls == 1:  # the first are counts, the next are tokens
                counted.append(sum(sent))
            return super().exchange(rows, sent, received)

    def work(group: EmulatedGroup) -> None:
        experts = StackedExperts(4)
        distribute_experts(experts, find_experts(experts, size=2), Counting(group))
        tokens, weights = torch.randn(3, 16), torch.rand(3, 2)
        experts(tokens, torch.tensor([[0, 1], [1, 2], [3, 2]]), weights)

    emulate(2, work)
    assert counted == [4, 4]  # one, two and one


def test_numbers_of_no_expert_go_nowhere_and_no_gradients_are_kept_without_need() -> None:
    def work(group: EmulatedGroup) -> tuple[Tensor, int]:
        torch.manual_seed(1)
        experts, exchange = StackedExperts(2), Exchange(group)
        distribute_experts(experts, find_experts(experts, size=2), exchange)
        with torch.no_grad():
            out = experts(torch.ones(2, 3, 16), torch.full((2, 3, 1), 2), weights=torch.ones(2, 3, 1))
        return out, exchange.calls

    for out, calls in emulate(2, work):
        assert out.shape == (2, 3, 16) and not out.any() and calls == 3


def test_workers_in_different_blocks_are_told_so() -> None:
    def work(group: EmulatedGroup) -> None:
        model = MoeNet(drop=0.0)
        distribute_experts(model, find_experts(model, size=2), Exchange(group))
        block: Any = model.blocks[group.index]
        block(torch.randn(1, 8, 16))

    with pytest.raises(SyncError, match=r"runs the experts of blocks\.\d\.experts while this one runs"):
        emulate(2, work)


class Called(nn.Module):
    """A list whose members are called from outside, as many write it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])


class Uneven(ListedExperts):
    def __init__(self) -> None:
        super().__init__()
        self[1].up = nn.Linear(16, 3)


class Counts(StackedExperts):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(4))


def tied() -> nn.Module:
    block = RoutedBlock(StackedExperts())
    block.copy_of_up = block.experts.up
    return block


def tied_inside() -> nn.Module:
    experts = StackedExperts()
    experts.down_again = experts.down
    return RoutedBlock(experts)


def twice_in_an_expert() -> nn.Module:
    experts = ListedExperts()
    for expert in experts:
        expert.again = expert.up
    return RoutedBlock(experts)


def shared_by_two_blocks() -> nn.Module:
    experts = ListedExperts()
    return nn.ModuleList(RoutedBlock(experts) for _ in range(2))


@pytest.mark.parametrize(
    ("model", "size", "says"),
    [
        (nn.Sequential(nn.Linear(2, 2)), 2, "found no routed experts in Sequential.*Use shard=2 in its place"),
        (Called(), 2, "experts is a ModuleList, whose members are called from outside"),
        (MoeNet(), 3, r"blocks\.0\.experts has 4 experts, which 3 workers cannot share evenly\. Use experts=2 or 4\."),
        (MoeNet(), 3, r"blocks\.1\.experts has 4 experts"),
        (Uneven(), 2, "The members of .* do not all have parameters of the same shapes"),
        (Counts(), 2, "calls is a buffer among experts"),
        (tied(), 2, r"copy_of_up, experts\.up are one parameter"),
        (tied_inside(), 2, r"experts\.down, experts\.down_again are one parameter, so .*\. Untie it\."),
        (twice_in_an_expert(), 2, r"experts\.3\.up\.bias, experts\.3\.again\.bias are one parameter"),
        (shared_by_two_blocks(), 2, r"0\.experts\.0\.up\.weight, 1\.experts\.0\.up\.weight are one parameter"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(model: nn.Module, size: int, says: str) -> None:
    with pytest.raises(PlanError, match=f"(?s){says}"):
        find_experts(model, size=size)


def test_experts_can_be_named() -> None:
    class Plain(nn.Module):
        """Learns the number of experts from its weights."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(6, 4, 4))

        def forward(self, x: Tensor, which: Tensor, share: Tensor) -> Tensor:
            return torch.einsum("nki,nkij,nk->nj", x[:, None].expand(-1, which.shape[1], -1), self.weight[which], share)

    model = nn.ModuleDict({"one": Plain()})
    with pytest.raises(PlanError, match="found no routed experts"):
        find_experts(model, size=2)
    (found,) = find_experts(model, size=2, named=["o*"])
    assert (found.name, found.count, found.stacked) == ("one", 6, ("weight",))
    with pytest.raises(PlanError, match=r"experts=\['two'\] match no module of ModuleDict"):
        find_experts(model, size=2, named=["one", "two"])


class First:
    """The first of some workers, before anything travels."""

    def __init__(self, size: int) -> None:
        self.index, self.size, self.is_still = 0, size, False

    def exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        raise NotImplementedError


class Normalises(StackedExperts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, index, weights / weights.sum(1, keepdim=True))


class Global(StackedExperts):
    """Does what depends on an expert's number."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens, index, weights * (1.0 + 0.1 * index))


class Centres(StackedExperts):
    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(tokens - tokens.mean(0), index, weights)


@pytest.mark.parametrize("kind", [Normalises, Centres, Global])
@pytest.mark.parametrize("size", [2, 4])
def test_experts_that_depend_on_each_other_or_on_other_tokens_are_refused(kind: type[nn.Module], size: int) -> None:
    model = kind()
    with pytest.raises(PlanError, match="than the sum of what each of its experts returns alone"):
        distribute_experts(model, find_experts(model, size=size), First(size))
    assert all(len(parameter) == 4 for parameter in model.parameters()) and model.training


@torch.no_grad()
def test_weights_that_are_no_numbers_prove_nothing_and_that_is_said() -> None:
    model = StackedExperts()
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    distributed = distribute_experts(model, find_experts(model, size=2), First(2))
    assert "whether their experts depend on each other could not be tried" in distributed.headline


def test_a_wrong_call_says_what_experts_take() -> None:
    def work(group: EmulatedGroup) -> None:
        experts = StackedExperts()
        distribute_experts(experts, find_experts(experts, size=2), Exchange(group))
        experts(torch.ones(3, 16), torch.zeros(3, 2, dtype=torch.long), torch.ones(3, 4))

    with pytest.raises(PlanError, match=r"called with tokens \(3, 16\), index \(3, 2\), weights \(3, 4\)"):
        emulate(2, work)
