"""Cut layers on workers that are threads of this process: whose gradients are summed where, and numbers of no word."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.parallel.tensor import split_tensor as team_module
from paceline.parallel.tensor.apply import split_layers
from paceline.parallel.tensor.emulated_group import EmulatedGroup, emulate
from paceline.parallel.tensor.layers import Layer
from paceline.parallel.tensor.op_rules import rule_of
from paceline.parallel.tensor.split_tensor import TensorGroupOps


def test_a_parameter_that_gets_the_number_of_one_that_is_gone_is_not_taken_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(team_module, "id", lambda _: 7, raising=False)  # objects may follow each other in one place

    def work(group: EmulatedGroup) -> tuple[Tensor | None, Tensor | None]:
        team = TensorGroupOps(group, rules=rule_of)
        gone, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
        team.owner_sums_gradients_of([gone])
        team.copy_to_group(gone).sum().backward()
        partial = gone.grad
        del gone
        (team.copy_to_group(other) * (1 + group.index)).sum().backward()
        return partial, other.grad

    for partial, whole in emulate(2, work):
        assert partial is not None and partial.tolist() == [1.0, 1.0], "its owner sums it"
        assert whole is not None and whole.tolist() == [3.0, 3.0], "backward has summed it"


@pytest.mark.parametrize("size", [2, 3])
def test_numbers_of_words_that_are_there_are_looked_up_where_they_are(size: int) -> None:
    table, words = nn.Embedding(7, 4), torch.tensor([[0, 6, 3], [5, 2, 4]])
    for found in emulate(size, lambda group: _cut(table, group)(words)):
        torch.testing.assert_close(found, table(words))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("word", [-100, -1, 7, 40_000])
def test_numbers_of_no_word_are_refused_as_by_the_whole_table(word: int, size: int) -> None:
    table = nn.Embedding(7, 4)
    with pytest.raises(IndexError) as whole:
        table(torch.tensor([[1, word]]))
    with pytest.raises(IndexError) as cut:
        emulate(size, lambda group: _cut(table, group)(torch.tensor([[1, word]])))
    assert str(cut.value) == str(whole.value)


def _cut(table: nn.Embedding, group: EmulatedGroup) -> nn.Module:
    """This worker's rows of a table."""
    model = nn.Sequential(nn.Embedding.from_pretrained(table.weight.detach().clone(), freeze=False))
    split_layers(model, [Layer(name="0", role="vocabulary", sections=(7,))], TensorGroupOps(group, rules=rule_of))
    return model
