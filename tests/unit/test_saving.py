"""A model is filled from a checkpoint by the names of its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint.reader import Checkpoint, open_checkpoint
from paceline.checkpoint.writer import Writer
from paceline.comm.group import Alone
from paceline.errors import CheckpointError
from paceline.worker.saving import load_model


class TwoNames(nn.Module):
    """A bias with two names, and a cache that is one of its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.bias = self.inner.bias
        scale = torch.rand(2)
        self.register_buffer("scale", scale)
        self.register_buffer("cache", scale, persistent=False)


def saved(directory: Path, model: nn.Module, *, without: set[str]) -> Checkpoint:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if name not in without}
    writer = Writer(directory, keep=1, on_event=lambda event: None)
    writer.save(1, tensors, {}, {})
    path = writer.close()
    assert path is not None
    return open_checkpoint(path)


@pytest.mark.parametrize("without", ["bias", "inner.bias"])
def test_of_two_names_of_one_tensor_a_checkpoint_may_have_either(tmp_path: Path, without: str) -> None:
    model, other = TwoNames(), TwoNames()
    load_model("model", other, {"extra": {}}, saved(tmp_path, model, without={without}), Alone(), {}, {})
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def test_a_tensor_that_a_checkpoint_has_under_no_name_is_told_by_all_of_them(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, TwoNames(), without={"bias", "inner.bias"})
    with pytest.raises(CheckpointError, match=r"model\.bias: in the model, but not .*\n.*model\.inner\.bias: in the m"):
        load_model("model", TwoNames(), {"extra": {}}, checkpoint, Alone(), {}, {})
