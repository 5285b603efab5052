"""A copy of which pieces come as they are asked for: once on a host, never a hole, gone on with after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import paceline
from paceline.errors import CheckpointError
from paceline.hub import copied_pieces, part_copy
from paceline.hub.host_copy import host_copy
from paceline.parallel.absent_files import is_absent, keeping_parts
from paceline.parallel.absent_tensors import AbsentParameter, bring
from paceline.parallel.part_dtype import convert_parts
from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import StorageError

logging.disable_progress_bar()  # which would leave a thread behind
PIECE = 1 << 14


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    folder = tmp_path_factory.mktemp("far") / "base"
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return folder


@pytest.fixture
def far(base: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(base, tmp_path / "far"))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (copied_pieces, part_copy):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(copied_pieces, "REQUEST_BYTES", PIECE)


@pytest.fixture
def came(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """What was read of weights: names, where, and how many bytes."""
    asked: list[tuple[str, int, int]] = []
    own: Callable[..., bytes] = ObjectStore.read

    def read(self: ObjectStore, name: str, start: int = 0, end: int | None = None) -> bytes:
        data = own(self, name, start, end)
        if name.endswith(".safetensors"):
            asked.append((name, start, len(data)))
        return data

    monkeypatch.setattr(ObjectStore, "read", read)
    return asked


def loaded(far: Path, cache: Path, *args: Any, **options: Any) -> Any:
    """What a worker that keeps parts gets."""
    with keeping_parts(True):
        return paceline.from_pretrained(f"file://{far}", *args, cache_dir=cache, **options)


def same(model: Any, folder: Path, dtype: torch.dtype | str = "auto") -> bool:
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict()
    found = model.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_nothing_but_headers_comes_before_somebody_looks(
    far: Path, tmp_path: Path, came: list[tuple[str, int, int]]
) -> None:
    model = loaded(far, tmp_path / "cache")
    files = sorted(one.name for one in far.glob("*.safetensors"))
    assert sorted(came) == [(name, 0, PIECE) for name in files]
    assert all(type(one) is AbsentParameter for one in model.parameters() if is_absent(one))
    came.clear()
    weight = model.model.layers[1].mlp.down_proj.weight
    bring([weight])
    assert 0 < sum(length for _, _, length in came) <= weight.nbytes + 2 * PIECE
    assert same(model, far)
    came.clear()
    assert same(loaded(far, tmp_path / "cache"), far) and came == [], "another worker finds all of it here"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_another_type_and_more_precise_tensors_are_those_of_the_files(far: Path, tmp_path: Path, dtype: str) -> None:
    name = "model.norm.weight"
    path = far / json.loads((far / "model.safetensors.index.json").read_text())["weight_map"][name]
    save_file({**load_file(path), name: torch.randn(64)}, path, {"format": "pt"})
    near, model = paceline.from_pretrained(far, dtype=dtype), loaded(far, tmp_path / "cache", dtype=dtype)
    convert_parts(near)
    convert_parts(model)
    expected = near.state_dict()
    for key, value in model.state_dict().items():
        assert value.dtype == expected[key].dtype and torch.equal(value, expected[key])


def test_weights_that_begin_anew_and_buffers_are_here(far: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    options: dict[str, Any] = {"new": ["score.weight"], "unused": ["lm_head.weight"]}
    near = paceline.from_pretrained(far, AutoModelForSequenceClassification, **options)
    torch.manual_seed(1)
    model = loaded(far, tmp_path / "cache", AutoModelForSequenceClassification, **options)
    assert torch.equal(model.score.weight, near.score.weight) and not is_absent(model.score.weight)
    assert not any(map(is_absent, model.buffers()))
    tokens = torch.arange(6).view(1, 6)
    assert torch.equal(model(tokens).logits, near(tokens).logits)


def test_the_folder_that_a_model_was_made_from_has_no_hole(far: Path, tmp_path: Path) -> None:
    folder = Path(loaded(far, tmp_path / "cache").paceline_folder)
    assert (folder / "config.json").read_bytes() == (far / "config.json").read_bytes()
    for path in folder.glob("*.safetensors"):
        assert (far / path.name).read_bytes().startswith(path.read_bytes())
    with pytest.raises(Exception, match=r"(?i)incomplete|not fully covered|cut short|header"):
        AutoModelForCausalLM.from_pretrained(folder)
    with pytest.raises(CheckpointError, match="was cut short"):
        paceline.from_pretrained(folder)


def test_outside_of_workers_that_keep_parts_the_whole_comes(far: Path, tmp_path: Path) -> None:
    model = paceline.from_pretrained(f"file://{far}", cache_dir=tmp_path / "cache")
    assert all(type(one) is torch.nn.Parameter for one in model.parameters())
    [whole] = [one for one in (tmp_path / "cache").iterdir() if one.is_dir()]
    for path in far.iterdir():
        assert (whole / path.name).read_bytes() == path.read_bytes()
    assert same(loaded(far, tmp_path / "cache"), far)


def test_a_whole_copy_goes_on_from_the_pieces_and_models_go_on_with_it(
    far: Path, tmp_path: Path, came: list[tuple[str, int, int]]
) -> None:
    model = loaded(far, tmp_path / "cache")
    bring([model.lm_head.weight])
    before = list(came)
    host_copy(f"file://{far}", tmp_path / "cache")
    assert len(came) == len(set(came)) and before == came[: len(before)]
    del came[:]
    assert same(model, far) and came == [], "the files were renamed meanwhile, and are the same"


def test_weights_that_change_meanwhile_are_refused_and_nothing_of_them_is_kept(far: Path, tmp_path: Path) -> None:
    cache, before = tmp_path / "cache", {path.name: path.read_bytes() for path in far.iterdir()}
    model = loaded(far, cache)
    bring([model.model.layers[0].mlp.up_proj.weight])
    for path in far.glob("*.safetensors"):
        os.utime(path, (1, 1))  # written anew, by its time
    with pytest.raises(CheckpointError, match="was changed while it was read: start again when all of it is written"):
        model.lm_head.weight.sum()
    with pytest.raises(CheckpointError, match="was removed, or the weights were changed"):
        model.lm_head.weight.sum()
    again = loaded(far, cache)
    assert same(again, far) and far.joinpath("config.json").read_bytes() == before["config.json"]


def test_a_copy_that_was_removed_is_missed(far: Path, tmp_path: Path) -> None:
    model = loaded(far, tmp_path / "cache")
    shutil.rmtree(next((tmp_path / "cache").glob("*.partial")))
    with pytest.raises(CheckpointError, match="it was removed"):
        model.lm_head.weight.sum()


def test_a_file_that_was_removed_comes_again_as_a_whole(
    far: Path, tmp_path: Path, came: list[tuple[str, int, int]]
) -> None:
    bring(loaded(far, tmp_path / "cache").parameters())
    [gone, *others] = sorted(next((tmp_path / "cache").glob("*.partial")).glob("*.safetensors"))
    gone.unlink()
    came.clear()
    assert same(loaded(far, tmp_path / "cache"), far)
    assert others and {name for name, _, _ in came} == {gone.name}
    whole = host_copy(f"file://{far}", tmp_path / "cache")
    assert (whole / gone.name).read_bytes() == (far / gone.name).read_bytes()


def test_a_disk_without_room_is_told_before_anything_comes(
    far: Path, tmp_path: Path, came: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(far, tmp_path / "cache")
    came.clear()
    with monkeypatch.context() as during:
        during.setattr(copied_pieces.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 5}))
        with pytest.raises(CheckpointError, match=r"KiB more to come, and 5 B are free .*cache_dir="):
            model.lm_head.weight.sum()
    assert came == []
    assert same(model, far)


def test_threads_and_models_of_one_host_ask_once(far: Path, tmp_path: Path, came: list[tuple[str, int, int]]) -> None:
    models = [loaded(far, tmp_path / "cache") for _ in range(3)]
    threads = [threading.Thread(target=model.lm_head.weight.sum) for model in models]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert len(came) == len(set(came))
    assert all(same(model, far) for model in models)


def test_what_came_before_a_kill_is_not_asked_for_again(
    far: Path, tmp_path: Path, came: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copied_pieces, "SETTLED_BYTES", PIECE)
    monkeypatch.setattr(copied_pieces, "THREADS", 1)
    own, noted_now = copied_pieces._Ledger.add, list[object]()

    def add(self: Any, pieces: Any) -> None:
        pieces = list(pieces)
        own(self, pieces)
        noted_now.extend(piece for piece in pieces if piece[1])
        if len(noted_now) >= 3:
            os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if not child:
        try:
            copied_pieces._Ledger.add = add
            bring(loaded(far, tmp_path / "cache").parameters())
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    ledger = next((tmp_path / "cache").glob("*.partial")) / ".pieces"
    noted = [json.loads(line) for line in ledger.read_text().splitlines() if line]
    with open(ledger, "a") as file:
        file.write('\n["model-0')  # cut by the kill
    kept = [(name, start) for name, start, _ in noted if start]
    assert len(kept) >= 3
    model = loaded(far, tmp_path / "cache")
    assert same(model, far)
    assert not {(name, start) for name, start, _ in came} & {*kept}


def test_pieces_that_another_machine_has_noted_are_looked_at_anew(
    far: Path, tmp_path: Path, came: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(far, tmp_path / "cache")
    bring(model.parameters())
    dropped: list[int] = []
    own = os.posix_fadvise
    monkeypatch.setattr(copied_pieces, "_boot_id", lambda: "another")
    monkeypatch.setattr(os, "posix_fadvise", lambda *about: (dropped.append(about[1]), own(*about)))
    came.clear()
    assert same(loaded(far, tmp_path / "cache"), far)
    assert came == [] and len(set(dropped)) > 3


def test_a_store_that_stays_away_is_an_error_where_somebody_looked(
    far: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(far, tmp_path / "cache")

    def away(*_: object, **__: object) -> bytes:
        raise StorageError("the store is away")

    with monkeypatch.context() as during:
        during.setattr(ObjectStore, "read", away)
        with pytest.raises(StorageError, match="is away"):
            model.lm_head.weight.sum()
    assert same(model, far)
