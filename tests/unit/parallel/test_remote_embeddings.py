"""Embeddings whose tables are elsewhere compute what torch's do; whatever needs a whole table is refused by name."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.comm.remote_tensors import is_remote, remote_tensor
from paceline.errors import PlanError
from paceline.parallel.check.model_support import require_fit
from paceline.parallel.check.optimizer_requirements import why_not_by_rows
from paceline.parallel.remote_embeddings import use_remote_tables
from paceline.plan import Compute, ParameterServer, Plan

SERVED = Plan(sync=ParameterServer())
ROWS, WIDTH = 12, 4


class Held:
    """Holds tables, and notes which rows were asked for."""

    def __init__(self) -> None:
        self.whole_of: dict[int, Tensor] = {}
        self.asked: list[list[int]] = []
        self._tables: list[Parameter] = []

    def add(self, parameter: Parameter) -> None:
        self._tables.append(parameter)

    def leave(self) -> None:
        for one in self._tables:
            self.whole_of[id(one)] = one.detach().clone()
            one.data = remote_tensor(one)

    def rows(self, parameter: Parameter, numbers: Tensor) -> Tensor:
        self.asked.append(numbers.tolist())
        return self.whole_of[id(parameter)][numbers]

    def whole(self, parameter: Parameter) -> Tensor:
        return self.whole_of[id(parameter)]


def elsewhere(model: nn.Module) -> Held:
    held = Held()
    use_remote_tables(model, held)
    held.leave()
    return held


WORDS = torch.tensor([[1, 7, 1, 5], [7, 7, 3, 0]])
FLAT, OFFSETS = torch.tensor([5, 5, 3, 1, 7, 3]), torch.tensor([0, 2, 2, 6])
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, -1.0, 3.0, 0.1])


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Embedding(ROWS, WIDTH, padding_idx=7, sparse=True), (WORDS,)),
        (lambda: nn.Embedding(ROWS, WIDTH, sparse=True), (torch.tensor(4),)),
        (lambda: nn.Embedding(ROWS, WIDTH, sparse=True), (torch.empty(0, 2, dtype=torch.int32),)),
        (lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=5, sparse=True), (FLAT, OFFSETS[:3])),
        (lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="mean", padding_idx=9, sparse=True), (WORDS,)),
        (
            lambda: nn.EmbeddingBag(ROWS, WIDTH, mode="sum", include_last_offset=True, sparse=True),
            (FLAT, OFFSETS, WEIGHTS),
        ),
    ],
)
def test_lookups_elsewhere_are_those_of_torch_and_so_are_their_gradients(
    make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]
) -> None:
    torch.manual_seed(0)
    own = make()
    model = nn.Sequential(copy.deepcopy(own))
    held = elsewhere(model)
    (weight,) = model.parameters()
    outputs = []
    for one in (own, model[0]):
        for _ in range(2):  # micro-batches
            outputs.append(one(*inputs))
            (outputs[-1] * torch.arange(WIDTH)).square().sum().backward()
    torch.testing.assert_close(outputs[2:], outputs[:2])
    (expected,) = (parameter.grad.coalesce() for parameter in own.parameters() if parameter.grad is not None)
    assert weight.grad is not None and weight.grad.is_sparse
    found = weight.grad.coalesce()
    torch.testing.assert_close(found.to_dense(), expected.to_dense())
    assert found.indices().tolist() == expected.indices().tolist()
    assert held.asked == [inputs[0].unique().tolist()] * 2
    assert repr(model[0]) == repr(own)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.again = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.again.weight = self.words.weight  # looks rows up, too: nothing is against that
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        return F.linear(self.words(words) + self.again(words), self.words.weight)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Named(nn.Embedding):
    def doubled(self, words: Tensor) -> Tensor:
        return 2 * self(words)


def test_code_that_reads_a_whole_table_is_told_its_name() -> None:
    model = Tied()
    elsewhere(model)
    with pytest.raises(RuntimeError, match=r"weight of Embedding\(12, 4, sparse=True\) was read.*sparse=False"):
        model(WORDS)
    with pytest.raises(RuntimeError, match=r"cannot be copied or pickled.*model.state_dict\(\)"):
        copy.deepcopy(model)


def test_the_state_of_a_model_has_whole_tables_and_a_class_of_ones_own_stays() -> None:
    model = nn.ModuleDict({"words": Named(ROWS, WIDTH, sparse=True), "other": nn.Embedding(3, WIDTH)})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    copied = copy.deepcopy(model)
    elsewhere(model)
    table = dict(model.named_parameters())["words.weight"]
    assert is_remote(table) and table.shape == (ROWS, WIDTH) and table.untyped_storage().nbytes() == 4
    torch.testing.assert_close(dict(model.state_dict()), before)
    torch.testing.assert_close(dict(copied.state_dict()), before)
    words: Any = model["words"]
    torch.testing.assert_close(words.doubled(WORDS), 2 * before["words.weight"][WORDS])


def sparse(kind: Any = nn.Embedding, **more: Any) -> nn.ModuleDict:
    return nn.ModuleDict({"table": kind(ROWS, WIDTH, sparse=True, **more)})


def tied() -> Tied:
    model = Tied()
    model.head.weight = model.words.weight
    return model


def computed() -> nn.Module:
    model = sparse()
    torch.nn.utils.parametrizations.weight_norm(model["table"])
    return model


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (tied, r"head.weight is the matrix of words.*Use sparse=False in words"),
        (computed, r"(?s)table = .*computed \(a parametrization\)"),
        (lambda: sparse(Scaled), r"table = Scaled.*a forward of its own"),
        (lambda: sparse(max_norm=1.0), r"max_norm=1.0 changes rows in the forward"),
        (lambda: sparse(scale_grad_by_freq=True), r"no sparse gradients with scale_grad_by_freq=True"),
        (lambda: sparse(nn.EmbeddingBag, mode="max"), r"no sparse gradients with mode='max'"),
    ],
)
def test_tables_that_cannot_be_divided_are_refused_by_name(make: Callable[[], nn.Module], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        require_fit(make(), SERVED)


def test_tables_that_are_looked_up_are_well() -> None:
    require_fit(Tied(), SERVED)
    require_fit(sparse(Named), SERVED)
    with pytest.raises(PlanError, match=r"compile=True"):
        require_fit(sparse(), Plan(sync=ParameterServer(), compute=Compute(compile=True)))
    with pytest.raises(PlanError, match=re.escape("sync=ParameterServer()")):
        require_fit(sparse(), Plan())


class ByNorm(torch.optim.SGD):
    """An update of the length of the rate, of the matrix as a whole."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(
                    parameter.grad, alpha=-group["lr"] / float(parameter.grad.coalesce().values().norm())
                )


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda table: torch.optim.SparseAdam([table], lr=1e-12), None),
        (lambda table: torch.optim.Adagrad([table], lr=0.1, initial_accumulator_value=0.1), None),
        (lambda table: torch.optim.SGD([table], lr=0.1), None),
        (lambda table: torch.optim.Adam([table]), "it cannot step with sparse gradients (Adam does not support"),
        (lambda table: torch.optim.SGD([table], lr=0.1, weight_decay=0.1), "it cannot step with sparse gradients"),
        (lambda table: torch.optim.SGD([table], lr=0.1, momentum=0.9), "what it keeps of a matrix (momentum_buffer)"),
        (lambda table: ByNorm([table], lr=0.1), "it looks at a matrix as a whole"),
    ],
)
def test_optimizers_are_tried_by_rows(make: Callable[[Parameter], torch.optim.Optimizer], why: str | None) -> None:
    table = Parameter(torch.ones(ROWS, WIDTH))
    optimizer = make(table)
    before = copy.deepcopy(optimizer.state_dict())
    found = why_not_by_rows(optimizer, table)
    assert found is None if why is None else found is not None and found.startswith(why)
    torch.testing.assert_close(optimizer.state_dict(), before)
