"""Weights as safetensors: values, ties, atomicity, and the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from paceline.checkpoint import export
from paceline.checkpoint.export import export_checkpoint, export_safetensors, main_export
from paceline.checkpoint.writer import Writer
from paceline.errors import CheckpointError


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)


def save(directory: Path, model: nn.Module, *, step: int = 5, prefix: str = "model") -> Path:
    tensors = {f"{prefix}.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors["optimizer.state.embed.weight.exp_avg"] = torch.zeros(7, 4)
    writer = Writer(directory, keep=3, on_event=lambda event: None)
    writer.save(step, tensors, {}, {})
    path = writer.close()
    assert path is not None
    return path


def test_a_checkpoint_becomes_a_file_that_safetensors_loads_into_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    export_checkpoint(save(tmp_path / "checkpoints", model), tmp_path / "out" / "model.safetensors")
    again = Tied()
    missing, unexpected = load_model(again, tmp_path / "out" / "model.safetensors")
    assert not missing and not unexpected
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert "head.weight" not in file.keys() and "embed.weight" in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight", "step": "5"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_views_and_layouts_are_stored_as_their_own_values(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {"t": base.t(), "part": base[1:3], "base": base, "half": base.half()}
    export_safetensors(tensors, tmp_path / "x.safetensors", {"note": "kept"})
    loaded = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_a_failed_export_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.safetensors"
    export_safetensors({"x": torch.ones(2)}, target)

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export.os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"x\.safetensors could not be written: .*No space left"):
        export_safetensors({"x": torch.zeros(2)}, target)
    assert torch.equal(load_file(target)["x"], torch.ones(2))
    assert list(tmp_path.iterdir()) == [target]


def test_the_command_takes_a_run_its_checkpoints_or_one_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    save(run / "checkpoints", Tied(), step=1)
    newest = save(run / "checkpoints", Tied(), step=2)
    (run / "checkpoints" / "step_00000003").mkdir()
    for source in (run, run / "checkpoints", newest):
        target = tmp_path / "model.safetensors"
        assert main_export(source, target) == 0
        with safe_open(target, "pt") as file:
            assert file.metadata()["step"] == "2"
        out = capsys.readouterr()
        assert str(target) in out.out and str(newest) in out.out
        assert ("step_00000003" in out.err) == (source != newest), "what was passed over is named"


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main_export(tmp_path, tmp_path / "x.safetensors") == 1
    assert "neither a checkpoint nor a run with a complete one" in capsys.readouterr().err
    other = save(tmp_path / "checkpoints", Tied(), prefix="net")
    assert main_export(other, tmp_path / "x.safetensors") == 1
    assert "no tensors named model....; its names begin with net., optimizer." in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists()
