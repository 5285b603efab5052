"""Trials of models whose weights are mapped: on other numbers, which leave the files unread and the weights alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.parallel.check.model_check import check_model
from paceline.parallel.stand_in_weights import stand_in_weights
from paceline.plan import Layout, Plan

WIDTH, CPU = 256, torch.device("cpu")


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True, norm_first=True) for _ in range(4)]
    return nn.Sequential(nn.Embedding(64, WIDTH), *blocks, nn.Linear(WIDTH, 64))


@pytest.fixture
def mapped(tmp_path: Path) -> nn.Module:
    made = model()
    save_file(made.state_dict(), tmp_path / "weights")
    made.load_state_dict(load_file(tmp_path / "weights"), assign=True)
    return made


def read_kib(path: Path) -> int:
    """What of a file is in this process's memory."""
    found, is_it = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            is_it = line.endswith(str(path))
        elif is_it and line.startswith("Rss:"):
            found += int(line.split()[1])
    return found


@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(stages=2), Layout(context=2)])
def test_what_a_layout_finds_is_as_on_the_weights_themselves_and_reads_none_of_them(
    mapped: nn.Module, tmp_path: Path, layout: Layout
) -> None:
    before = read_kib(tmp_path / "weights")  # with the header
    found, expected = (check_model(one, Plan(layout=layout), device=CPU) for one in (mapped, model()))
    assert read_kib(tmp_path / "weights") < before + 200  # of 8,600
    assert found.error() is None and expected.error() is None
    assert (found.tensor, found.context) == (expected.tensor, expected.context)
    partitions = [None if one.stages is None else one.stages.partition for one in (found, expected)]
    assert partitions[0] == partitions[1]
    assert all(torch.equal(a, b) for a, b in zip(mapped.parameters(), model().parameters(), strict=True))


def test_the_numbers_are_the_same_everywhere_and_no_writing_reaches_the_weights(mapped: nn.Module) -> None:
    seen: list[list[Tensor]] = []
    for _ in range(2):
        with stand_in_weights(mapped), torch.no_grad():
            seen.append([one.clone() for one in mapped.parameters()])
            for one in mapped.parameters():
                one.zero_()
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))
    assert all(bool(one.isfinite().all()) and float(one.std()) > 0 for one in seen[0])
    assert len({float(one.flatten()[0]) for one in seen[0]}) > 10  # windows of their own
    assert all(torch.equal(a, b) for a, b in zip(mapped.parameters(), model().parameters(), strict=True))


def test_tied_weights_stay_tied_and_weights_in_memory_stay_themselves(tmp_path: Path) -> None:
    save_file({"a": torch.randn(6, 4)}, tmp_path / "weights")
    weight, own = load_file(tmp_path / "weights")["a"], nn.Parameter(torch.randn(3))
    tied = nn.Module()
    tied.one, tied.other, tied.own = nn.Parameter(weight), nn.Parameter(weight), own
    before, data = own.detach().clone(), own.data_ptr()
    with stand_in_weights(tied):
        assert tied.one.data_ptr() == tied.other.data_ptr() and not torch.equal(tied.one, weight)
        assert own.data_ptr() == data and torch.equal(own, before)
    assert torch.equal(tied.one, weight) and torch.equal(tied.other, weight)


def test_weights_come_back_when_a_trial_raises(mapped: nn.Module) -> None:
    with pytest.raises(ValueError, match="the user's"), stand_in_weights(mapped):
        raise ValueError("the user's")
    assert all(torch.equal(a, b) for a, b in zip(mapped.parameters(), model().parameters(), strict=True))
