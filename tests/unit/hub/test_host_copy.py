"""The copy of a folder in object storage: made once, gone on with after a kill, named by what the store has."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.errors import CheckpointError
from paceline.hub import copied_pieces
from paceline.hub import host_copy as module
from paceline.hub.host_copy import host_copy
from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import StorageError


@pytest.fixture
def far(tmp_path: Path) -> Path:
    folder = tmp_path / "far"
    folder.mkdir()
    save_file({"a": torch.arange(1000)}, folder / "model-1.safetensors")
    save_file({"b": torch.arange(9)}, folder / "model-2.safetensors")
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(bytes(100))
    (folder / "model-3.safetensors").write_bytes(b"of another model")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was asked of the store: names, and where pieces begin. Pieces are small."""
    asked: list[tuple[str, int]] = []
    own: Callable[..., bytes] = ObjectStore.read

    def read(self: ObjectStore, name: str, start: int = 0, end: int | None = None) -> bytes:
        asked.append((name, start))
        return own(self, name, start, end)

    monkeypatch.setattr(ObjectStore, "read", read)
    monkeypatch.setattr(copied_pieces, "PIECE_BYTES", 1000)
    monkeypatch.setattr(copied_pieces, "REQUEST_BYTES", 1000)
    return asked


def test_the_files_of_the_index_come_in_pieces_and_once(
    far: Path, tmp_path: Path, reads: list[tuple[str, int]]
) -> None:
    folder = host_copy(f"file://{far}", tmp_path / "cache")
    assert sorted(one.name for one in folder.iterdir()) == [
        "config.json",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    for name in ("model-1.safetensors", "model-2.safetensors"):
        assert (folder / name).read_bytes() == (far / name).read_bytes()
    assert ("model-1.safetensors", 8000) in reads
    reads.clear()
    assert host_copy(f"file://{far}", tmp_path / "cache") == folder
    assert reads == [("model.safetensors.index.json", 0)]


def test_weights_that_were_written_anew_are_another_copy(far: Path, tmp_path: Path) -> None:
    first = host_copy(f"file://{far}", tmp_path / "cache")
    save_file({"b": torch.arange(9) + 1}, far / "model-2.safetensors")
    os.utime(far / "model-2.safetensors", (1, 1))
    second = host_copy(f"file://{far}", tmp_path / "cache")
    assert second != first
    assert load_file(second / "model-2.safetensors")["b"].tolist() == list(range(1, 10))
    assert load_file(first / "model-2.safetensors")["b"].tolist() == list(range(9)), "workers may have it mapped"


def test_a_broken_download_is_gone_on_with(
    far: Path, tmp_path: Path, reads: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = ObjectStore.read

    def breaking(self: ObjectStore, name: str, start: int = 0, end: int | None = None) -> bytes:
        if (name, start) == ("model-1.safetensors", 8000):
            raise StorageError("the store is away")
        return counted(self, name, start, end)

    with monkeypatch.context() as during:
        during.setattr(ObjectStore, "read", breaking)
        during.setattr(copied_pieces, "THREADS", 1)
        with pytest.raises(StorageError, match="is away"):
            host_copy(f"file://{far}", tmp_path / "cache")
    assert [one for one in (tmp_path / "cache").iterdir() if one.is_dir() and not one.suffix] == []
    with open(next((tmp_path / "cache").glob("*.partial")) / ".pieces", "a") as file:
        file.write('\n["model-2')  # cut by a kill
    reads.clear()
    folder = host_copy(f"file://{far}", tmp_path / "cache")
    assert ("model-1.safetensors", 8000) in reads and ("model-1.safetensors", 0) not in reads
    assert (folder / "model-1.safetensors").read_bytes() == (far / "model-1.safetensors").read_bytes()


@pytest.mark.parametrize("what", ["written anew", "the index is no JSON", "removed"])
def test_a_folder_that_changes_during_the_download_is_no_copy(
    far: Path, tmp_path: Path, reads: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    counted = ObjectStore.read
    before = {path.name: path.read_bytes() for path in far.iterdir()}

    def overtaken(self: ObjectStore, name: str, start: int = 0, end: int | None = None) -> bytes:
        if (name, start) == ("model-1.safetensors", 3000):
            if what == "removed":
                (far / "model-1.safetensors").unlink()
            elif what == "written anew":
                save_file({"a": torch.arange(1000) + 1}, far / "model-1.safetensors")  # of the same size
            else:
                (far / "model.safetensors.index.json").write_bytes(bytes(len(before["model.safetensors.index.json"])))
        return counted(self, name, start, end)

    with monkeypatch.context() as during:
        during.setattr(ObjectStore, "read", overtaken)
        during.setattr(copied_pieces, "THREADS", 1)
        with pytest.raises(CheckpointError, match="was changed while it was read: start again when all of it"):
            host_copy(f"file://{far}", tmp_path / "cache")
    assert [one.name for one in (tmp_path / "cache").iterdir() if one.is_dir()] == []
    for name, data in before.items():
        (far / name).write_bytes(data)
    save_file({"a": torch.arange(1000) + 2}, far / "model-1.safetensors")
    folder = host_copy(f"file://{far}", tmp_path / "cache")
    assert load_file(folder / "model-1.safetensors")["a"].tolist() == list(range(2, 1002))


def test_an_answer_that_fails_at_the_end_costs_no_second_download(
    far: Path, tmp_path: Path, reads: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: ObjectStore) -> str:
        raise StorageError("the store is away")

    with monkeypatch.context() as during:
        during.setattr(module, "_identity_now", refused)
        with pytest.raises(StorageError, match="is away"):
            host_copy(f"file://{far}", tmp_path / "cache")
    reads.clear()
    folder = host_copy(f"file://{far}", tmp_path / "cache")
    assert {name for name, _ in reads} == {"model.safetensors.index.json"}
    assert (folder / "model-1.safetensors").read_bytes() == (far / "model-1.safetensors").read_bytes()
    assert not (folder / ".pieces").exists()


def test_several_workers_of_a_host_download_once(far: Path, tmp_path: Path, reads: list[tuple[str, int]]) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(host_copy(f"file://{far}", tmp_path / "cache"))) for _ in range(4)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len(found) == 4 and len(set(found)) == 1
    assert reads.count(("model-1.safetensors", 0)) == 1


def test_a_worker_that_downloads_nothing_is_not_waited_for(far: Path, tmp_path: Path) -> None:
    folder = host_copy(f"file://{far}", tmp_path / "cache")
    folder.rename(tmp_path / "away")
    with open(folder.with_suffix(".lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match=r"nothing has come there for 0.3 s: end it"):
            host_copy(f"file://{far}", tmp_path / "cache", still_s=0.3)


def test_what_cannot_be_copied_is_refused_before_anything_comes(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as during:
        during.setattr(copied_pieces.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
        with pytest.raises(CheckpointError, match=r"KiB more to come, and 5 B are free .*cache_dir="):
            host_copy(f"file://{far}", tmp_path / "cache")
    (far / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model-2.safetensors: upload the folder again"):
        host_copy(f"file://{far}", tmp_path / "cache")
    (far / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config.json \(it has model-1.safetensors"):
        host_copy(f"file://{far}", tmp_path / "cache")
    with pytest.raises(CheckpointError, match=r"has no config.json, and nothing else"):
        host_copy(f"file://{far}-absent", tmp_path / "cache")
