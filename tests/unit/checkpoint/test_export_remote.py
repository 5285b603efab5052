"""`paceline export` to addresses and from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.export_remote import main_remote_export
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from paceline.checkpoint.remote.uploader import Uploader
from paceline.errors import PlanError
from paceline.storage.exports import written_to
from remote_runs import BreakingStore


@pytest.fixture
def address(tmp_path: Path) -> str:
    """The address of a run with the steps 1 and 2."""
    writer = AsyncWriter(tmp_path / "run" / "checkpoints", keep=3, on_event=print)
    for step in (1, 2):
        writer.save(step, {"model.weight": torch.full((3,), float(step))}, {"step": step}, {})
    writer.close()
    address = f"file://{tmp_path}/far/run"
    uploader = Uploader(tmp_path / "run", RemoteCheckpoints(BreakingStore(address)), keep=3)
    while uploader.waiting():
        uploader.turn()
    return address


def exported(source: str | Path, target: str | Path) -> int:
    return main_remote_export(Path(source), Path(target))


def test_weights_go_to_a_store_and_come_from_one(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    far = f"file://{tmp_path}/far"
    assert exported(tmp_path / "run", f"{far}/one/model.safetensors") == 0
    assert f"{far}/one/model.safetensors" in capsys.readouterr().out
    assert exported(address, f"{far}/folder") == 0
    assert exported(f"{address}/step_00000001", tmp_path / "first.safetensors") == 0
    found = [
        tmp_path / "far/one/model.safetensors",
        tmp_path / "far/folder/model.safetensors",
        tmp_path / "first.safetensors",
    ]
    assert [load_file(path)["weight"].tolist() for path in found] == [[2.0] * 3, [2.0] * 3, [1.0] * 3]


def test_a_folder_with_other_weights_is_refused(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "far" / "folder"
    folder.mkdir()
    (folder / "model-00001-of-00002.safetensors").touch()
    assert exported(address, f"file://{folder}") == 1
    assert "has other weights already (model-00001-of-00002.safetensors)" in capsys.readouterr().err


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert exported(f"file://{tmp_path}/nothing", tmp_path / "x.safetensors") == 1
    assert "is neither a checkpoint nor a run with a complete one" in capsys.readouterr().err
    with pytest.raises(PlanError, match="a place of its own"):
        exported("s3://bucket", tmp_path / "x.safetensors")


def test_an_export_that_fails_sends_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), written_to(Path(f"file://{tmp_path}/far/model.safetensors")) as local:
        local.write_bytes(b"half")
        raise ZeroDivisionError
    assert not (tmp_path / "far").exists()
