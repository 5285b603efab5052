"""Weights as safetensors: values, ties, atomicity, and the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.export import export_checkpoint, export_folder, main_export
from paceline.checkpoint.safetensors_file import write_safetensors
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
    writer = AsyncWriter(directory, keep=3, on_event=lambda event: None)
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
        assert "head.weight" not in file.keys() and "embed.weight" in file.keys()  # noqa: SIM118  # a file of safetensors is no mapping
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight", "step": "5"}
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_tensor_that_a_module_keeps_as_extra_state_is_a_weight_like_the_others(tmp_path: Path) -> None:
    writer = AsyncWriter(tmp_path / "checkpoints", keep=1, on_event=lambda event: None)
    extra = {"model": {"0._extra_state": torch.arange(3), "1._extra_state": {"count": 3}}}
    writer.save(5, {"model.0.weight": torch.ones(2)}, {"run": {"extra": extra}}, {})
    path = writer.close()
    assert path is not None
    (file,) = export_checkpoint(path, tmp_path / "model.safetensors")
    found = load_file(file)
    assert sorted(found) == ["0._extra_state", "0.weight"] and found["0._extra_state"].tolist() == [0, 1, 2]


def written(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    about = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_safetensors(path, about, tensors.__getitem__, {"note": "kept"})
    return load_file(path)


def test_tensors_of_all_types_and_views_are_stored_as_their_own_values(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {"t": base.t(), "part": base[1:3], "odd": torch.tensor([True, False, True]), "half": base.half()}
    tensors |= {"wave": torch.randn(3, dtype=torch.complex64), "none": torch.zeros(0, 3), "one": torch.tensor(2.5)}
    tensors |= {"bf16": base.bfloat16(), "count": torch.tensor([3]), "byte": torch.arange(5, dtype=torch.uint8)}
    loaded = written(tmp_path / "x.safetensors", tensors)
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor), name
    with pytest.raises(CheckpointError, match=r"q is of torch\.complex128, which safetensors does not have"):
        written(tmp_path / "y.safetensors", {"q": torch.zeros(1, dtype=torch.complex128)})


def test_a_failed_export_leaves_the_file_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.safetensors"
    written(target, {"x": torch.ones(2)})

    def fail(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"x\.safetensors could not be written: .*No space left"):
        written(target, {"x": torch.zeros(2)})
    assert torch.equal(load_file(target)["x"], torch.ones(2))
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_gets_files_of_a_size_an_index_and_the_configuration(tmp_path: Path) -> None:
    model = Tied()
    source, target = save(tmp_path / "checkpoints", model), tmp_path / "hf"
    (tmp_path / "config.json").write_text('{"a": 1}')
    export_folder(source, target, max_shard_bytes=7 * 4 * 4, config=tmp_path)
    index = json.loads((target / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert sorted(one.name for one in target.iterdir()) == ["config.json", *files, "model.safetensors.index.json"]
    loaded = {name: value for file in files for name, value in load_file(target / file).items()}
    state = model.state_dict()
    assert loaded.keys() == index["weight_map"].keys() == state.keys() - {"head.weight"}
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in loaded.values())
    with pytest.raises(
        CheckpointError, match=r"has other weights already \(model-00001-of-00002\.safetensors, .*remove"
    ):
        export_folder(source, target)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"the configuration .*config\.json cannot be read"):
        export_folder(source, tmp_path / "other", config=tmp_path)
    assert not (tmp_path / "other").exists()


PEAK = """
import resource, sys
from pathlib import Path
from paceline.checkpoint.export import export_folder
import paceline.checkpoint.reader, torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_folder(Path(sys.argv[1]), Path(sys.argv[2]))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.thorough
def test_an_export_holds_little_more_than_the_largest_tensor(tmp_path: Path) -> None:
    large = nn.Module()
    for number in range(12):
        large.register_buffer(f"b{number}", torch.zeros(3 << 19))  # 6 MiB each, 72 MiB in all
    source = save(tmp_path / "checkpoints", large)
    words = [sys.executable, "-c", PEAK, str(source), str(tmp_path / "hf")]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 72 << 20
    assert int(done.stdout) < 24 << 10, "KiB above what Python and torch take"


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
