"""Save and read back: values, ties, dtypes, layouts, torch's own reader, what does not fit, what is damaged."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from paceline.checkpoint.async_writer import AsyncWriter
from paceline.checkpoint.reader import find, open_checkpoint
from paceline.checkpoint.staging import Staging
from paceline.errors import CheckpointError
from paceline.events import CheckpointSaved, Event

STATE = {"scheduler": {"last_epoch": 3, "lrs": [0.1, 0.2]}, "rng": torch.get_rng_state(), "position": (1, 2)}


def some_tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    tied = torch.nn.Parameter(torch.randn(5, 4))
    return {
        "model.weight": torch.nn.Parameter(torch.randn(4, 5)),
        "model.in.weight": tied,
        "model.out.weight": tied,
        "model.transposed": base.t(),
        "model.part": base[1:3, 2:4],
        "model.last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "model.scalar": torch.tensor(7, dtype=torch.int64),
        "model.empty": torch.empty(0, 3),
        "model.bf16": torch.randn(9).bfloat16(),
        "model.bool": torch.tensor([True, False, True]),
        "model.complex": torch.randn(3, dtype=torch.complex64).conj(),
        "optimizer.state.0.step": torch.tensor(12.0),
    }


def save(directory: Path, step: int = 100, tensors: dict[str, Tensor] | None = None, **about: Any) -> Path:
    writer = AsyncWriter(directory, keep=3, on_event=lambda event: None)
    writer.save(step, some_tensors() if tensors is None else tensors, STATE, about)
    path = writer.close()
    assert path is not None
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoints", plan="replicas=2")


def test_everything_comes_back(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)
    expected = some_tensors()
    assert saved.name == "step_00000100"
    assert (checkpoint.step, checkpoint.about["plan"], checkpoint.path) == (100, "replicas=2", saved)
    assert checkpoint.about["torch"] == torch.__version__
    assert set(checkpoint.names) == set(expected)
    loaded = checkpoint.load()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype == checkpoint.dtype(name), name
        assert loaded[name].shape == tensor.shape == checkpoint.shape(name), name
        assert torch.equal(loaded[name], tensor), name
    assert torch.equal(checkpoint.state.pop("rng"), STATE["rng"])
    assert checkpoint.state == {key: value for key, value in STATE.items() if key != "rng"}


def test_only_the_asked_tensors_are_read(saved: Path) -> None:
    assert set(open_checkpoint(saved).load(["model.part", "model.bool"])) == {"model.part", "model.bool"}
    with pytest.raises(CheckpointError, match=r"model\.nope: not in the checkpoint"):
        open_checkpoint(saved).load(["model.part", "model.nope"])
    with pytest.raises(CheckpointError, match=r"model\.nope: not in the checkpoint"):
        open_checkpoint(saved).shape("model.nope")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_torch_reads_it(saved: Path) -> None:
    expected = some_tensors()
    targets = {
        name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in expected.items()
    }
    dcp.load(targets, storage_reader=dcp.FileSystemReader(saved), planner=dcp.DefaultLoadPlanner(), no_dist=True)
    for name, tensor in expected.items():
        assert torch.equal(targets[name], tensor), name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_plain_torch_writes_is_understood(tmp_path: Path) -> None:
    from paceline.checkpoint.dcp_read import read_entry, read_index

    tensors = {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(3).bfloat16()}
    dcp.save(tensors, checkpoint_id=tmp_path / "plain", no_dist=True)
    index = read_index((tmp_path / "plain" / ".metadata").read_bytes())
    for name, tensor in tensors.items():
        assert torch.equal(read_entry(tmp_path / "plain", index[name], None), tensor)


def test_a_tensor_in_chunks_is_put_together(tmp_path: Path) -> None:
    from paceline.checkpoint.dcp_read import Chunk, Entry, read_entry

    whole = torch.arange(24.0).reshape(4, 6)
    chunks = []
    for number, (row, column) in enumerate([(0, 0), (0, 4), (2, 0), (2, 4)]):
        part = whole[row : row + 2, column : column + (4 if column == 0 else 2)].clone()
        torch.save(part, tmp_path / f"{number}.distcp")
        size = (tmp_path / f"{number}.distcp").stat().st_size
        sizes = tuple(part.shape)
        chunks.append(Chunk(offsets=(row, column), sizes=sizes, file=f"{number}.distcp", start=0, num_bytes=size))
    entry = Entry(dtype=torch.float32, shape=(4, 6), chunks=tuple(chunks))
    assert torch.equal(read_entry(tmp_path, entry, None), whole)
    short = Entry(dtype=torch.float32, shape=(4, 6), chunks=tuple(chunks[:3]))
    with pytest.raises(CheckpointError, match=r"do not cover a tensor of \[4, 6\]"):
        read_entry(tmp_path, short, None)


def test_tied_tensors_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(300, 1000))
    tied = save(tmp_path / "tied", tensors={"in": weight, "out": weight})
    alone = save(tmp_path / "alone", tensors={"in": weight})
    sizes = [(path / "__0_0.distcp").stat().st_size for path in (tied, alone)]
    assert sizes[0] == sizes[1] >= weight.nbytes
    loaded = open_checkpoint(tied).load()
    assert loaded["in"] is loaded["out"] and torch.equal(loaded["out"], weight)
    target = torch.zeros(300, 1000)
    open_checkpoint(tied).load_into({"out": target})
    assert torch.equal(target, weight)


def test_staging_does_not_see_later_changes_and_reuses_its_memory() -> None:
    staging = Staging()
    source = torch.arange(1000.0)
    first = staging.stage({"x": source}).tensors["x"]
    address = first.data_ptr()
    source.add_(1)
    assert torch.equal(first, torch.arange(1000.0))
    second = staging.stage({"x": source, "y": torch.ones(3, dtype=torch.int8)}).tensors
    assert second["x"].data_ptr() == address and torch.equal(second["x"], source)
    assert second["x"].untyped_storage().nbytes() == source.nbytes, "a storage of its own: nothing else is written"


def test_warm_gets_the_memory_that_the_first_save_uses(tmp_path: Path) -> None:
    staging = Staging()
    tensors = {"x": torch.randn(1 << 20)}
    staging.warm(tensors)
    block = staging._block
    staging.stage(tensors)
    assert block is not None and staging._block is block
    writer = AsyncWriter(tmp_path, keep=1, on_event=lambda event: None)
    writer.warm(tensors)
    writer.save(1, tensors, {}, {})
    path = writer.close()
    assert path is not None and torch.equal(open_checkpoint(path).load()["x"], tensors["x"])


def test_load_into_fills_in_place_and_keeps_the_layout_of_the_target(saved: Path) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 5))
    last = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    open_checkpoint(saved).load_into({"model.weight": parameter, "model.last": last})
    assert torch.equal(parameter, some_tensors()["model.weight"]) and parameter.requires_grad
    assert torch.equal(last, some_tensors()["model.last"]) and last.is_contiguous(memory_format=torch.channels_last)


def test_all_that_does_not_fit_is_in_one_error_and_nothing_is_changed(saved: Path) -> None:
    weight = torch.zeros(4, 5)
    targets = {
        "model.weight": weight,
        "model.part": torch.zeros(2, 3),
        "model.bf16": torch.zeros(9),
        "model.head": torch.zeros(1),
    }
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(saved).load_into(targets, prefix="optimizer.")
    assert str(raised.value).splitlines() == [
        f"checkpoint {saved} does not fit: it is of another model, or this one has changed. A run that is to begin "
        "anew takes --fresh or another --run-dir:",
        "  model.part: checkpoint has [2, 2], the model has [2, 3]",
        "  model.bf16: checkpoint has bfloat16, the model has float32",
        "  model.head: in the model, but not in the checkpoint",
        "  optimizer.state.0.step: in the checkpoint, but not in the model",
    ]
    assert not weight.any()


def test_at_most_ten_problems_are_listed(saved: Path) -> None:
    with pytest.raises(CheckpointError, match=r"and 7 more$") as raised:
        open_checkpoint(saved).load_into({f"x{index}": torch.zeros(1) for index in range(17)})
    assert len(str(raised.value).splitlines()) == 12


@pytest.mark.thorough
def test_reading_works_without_numpy_and_imports_no_distributed_checkpoint(saved: Path) -> None:
    program = (
        "import sys; sys.modules['numpy'] = None; sys.path[:0] = sys.argv[2:]\n"
        "from pathlib import Path; from paceline.checkpoint.reader import open_checkpoint\n"
        "from paceline.checkpoint.async_writer import AsyncWriter\n"
        "assert len(open_checkpoint(Path(sys.argv[1])).load()) == 12\n"
        "assert 'torch.distributed.checkpoint' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program, str(saved), *sys.path], check=True, timeout=60)


def test_looking_for_checkpoints_imports_no_torch() -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[1:]; import paceline.checkpoint.checkpoint_dir; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, *sys.path], check=True, timeout=60)


COLLECTIVES = ("all_gather_object", "all_reduce", "barrier", "broadcast", "broadcast_object_list", "gather_object")


def test_in_a_process_group_no_collective_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a collective: worker 0 would wait for workers that are not in this call")

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for name in (*COLLECTIVES, "scatter_object_list", "reduce_scatter_tensor", "all_gather_into_tensor"):
            monkeypatch.setattr(torch.distributed, name, refuse)
        with pytest.raises(AssertionError, match="a collective"):  # the trap works: torch's own save needs one
            dcp.save({"x": torch.ones(1)}, checkpoint_id=tmp_path / "torch")
        saved = save(tmp_path / "ours")
        assert torch.equal(open_checkpoint(saved).load()["model.part"], some_tensors()["model.part"])
    finally:
        torch.distributed.destroy_process_group()


# ----------------------------------------------------------------------------------------------------- damaged files


def rewrite(path: Path, name: str, data: bytes) -> None:
    """Replace a file and correct the mark, as somebody would who wants it to be believed."""
    (path / name).write_bytes(data)
    mark = json.loads((path / "checkpoint.json").read_text())
    del mark["crc32"]
    mark["files"][name], mark["file_crc32"][name] = len(data), zlib.crc32(data)
    mark["crc32"] = zlib.crc32(json.dumps(mark, sort_keys=True).encode())
    (path / "checkpoint.json").write_text(json.dumps(mark))


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", [".metadata", "state.pt"])
def test_a_malicious_file_runs_no_code(saved: Path, tmp_path: Path, name: str) -> None:
    touched = tmp_path / "touched"
    data = pickle.dumps(Touch(touched))
    if name == "state.pt":
        torch.save({"x": Touch(touched)}, tmp_path / "state.pt")
        data = (tmp_path / "state.pt").read_bytes()
    rewrite(saved, name, data)
    with pytest.raises(CheckpointError, match=r"\.metadata" if name == ".metadata" else "plain values"):
        open_checkpoint(saved)
    assert not touched.exists()


def test_a_malicious_index_inside_torchs_own_records_runs_no_code(saved: Path, tmp_path: Path) -> None:
    with open(saved / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = Touch(tmp_path / "touched")
    rewrite(saved, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"\.metadata is not an index of tensors: it asks for pathlib"):
        open_checkpoint(saved)
    assert not (tmp_path / "touched").exists()


class ByName(pickle.Pickler):
    """Writes members of an enum as Python 3.11.0 to 3.11.3 do, of which Debian 12 has one."""

    def reducer_override(self, obj: Any) -> Any:
        return (getattr, (type(obj), obj.name)) if isinstance(obj, enum.Enum) else NotImplemented


def test_an_index_that_an_older_python_has_written_is_read(saved: Path) -> None:
    whole = open_checkpoint(saved).load()
    with open(saved / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    written = io.BytesIO()
    ByName(written).dump(metadata)
    assert b"getattr" in written.getvalue()
    rewrite(saved, ".metadata", written.getvalue())
    found = open_checkpoint(saved).load()
    assert found.keys() == whole.keys() and all(torch.equal(found[name], whole[name]) for name in whole)


def test_a_malicious_tensor_runs_no_code(saved: Path, tmp_path: Path) -> None:
    torch.save({"x": Touch(tmp_path / "touched")}, tmp_path / "bad")
    data = (tmp_path / "bad").read_bytes()
    rewrite(saved, "__0_0.distcp", data + b"\0" * ((saved / "__0_0.distcp").stat().st_size - len(data)))
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        open_checkpoint(saved).load()
    assert not (tmp_path / "touched").exists()


def test_an_index_that_points_outside_the_checkpoint_is_refused(saved: Path) -> None:
    with open(saved / ".metadata", "rb") as file:
        metadata = pickle.load(file)
    for where in metadata.storage_data.values():
        where.relative_path = "../secret"
    rewrite(saved, ".metadata", pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"'\.\./secret', outside the checkpoint"):
        open_checkpoint(saved)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.pt", "checkpoint.json"])
@pytest.mark.parametrize("harm", [Path.unlink, truncate, flip])
def test_any_damaged_file_is_named(tmp_path: Path, name: str, harm: Callable[[Path], None]) -> None:
    tensors = {"x": torch.randn(50_000)}  # so that the flipped bit is one of the tensor's
    saved = save(tmp_path / "checkpoints", tensors=tensors)
    harm(saved / name)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(saved).load()


def test_the_newest_complete_one_is_found_and_the_others_are_named(tmp_path: Path) -> None:
    events: list[Event] = []
    writer = AsyncWriter(tmp_path, keep=9, on_event=events.append)
    for step in (1, 2, 3, 4):
        writer.save(step, {"x": torch.full((10,), float(step))}, {}, {})
    writer.close()
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [1, 2, 3, 4]
    truncate(tmp_path / "step_00000004" / "__0_0.distcp")
    (tmp_path / "step_00000003" / "checkpoint.json").unlink()
    shutil.copytree(tmp_path / "step_00000003", tmp_path / "step_00000005.partial-77")
    (tmp_path / "step_00000006.removed-77").mkdir()
    (tmp_path / "notes").mkdir()
    found = find(tmp_path)
    assert (found.newest, found.step) == (tmp_path / "step_00000002", 2)
    reasons = {path.name: reason for path, reason in found.skipped}
    assert reasons.keys() == {
        "step_00000003",
        "step_00000004",
        "step_00000005.partial-77",
        "step_00000006.removed-77",
    }
    assert "no checkpoint.json" in reasons["step_00000003"]
    assert "__0_0.distcp has" in reasons["step_00000004"]
    assert "no checkpoint.json" in reasons["step_00000005.partial-77"]
    assert "being deleted" in reasons["step_00000006.removed-77"]


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.pt", "checkpoint.json"])
def test_a_byte_that_changed_anywhere_in_a_file_is_named_and_the_next_older_one_is_taken(
    tmp_path: Path, name: str
) -> None:
    older, newest = (save(tmp_path, step, {"x": torch.randn(500)}) for step in (1, 2))
    path = newest / name
    good = path.read_bytes()
    for place in sorted(random.Random(name).sample(range(len(good)), 40)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        found = find(tmp_path, verified=True)
        assert (found.newest, found.step) == (older, 1), place
        [(skipped, reason)] = found.skipped
        assert skipped == newest and name in reason, place
    path.write_bytes(good)
    assert find(tmp_path, verified=True).newest == newest


def nest(path: Path) -> None:
    path.write_text('{"format": 1, "about": ' + "[" * 100_000)


def overflow(path: Path) -> None:
    fields = json.loads(path.read_text())
    del fields["crc32"]  # as in early versions
    path.write_text(json.dumps(fields).replace('"step": 2', '"step": 1e999'))


def become_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def become_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *(("checkpoint.json", harm) for harm in (nest, overflow)),
        *(
            (name, harm)
            for name in ("__0_0.distcp", ".metadata", "state.pt", "checkpoint.json")
            for harm in (become_pipe, become_device)
        ),
    ],
)
def test_what_cannot_be_read_to_its_end_is_named_and_the_next_older_one_is_taken(
    tmp_path: Path, name: str, harm: Callable[[Path], None]
) -> None:
    older, newest = (save(tmp_path, step, {"x": torch.randn(500)}) for step in (1, 2))
    harm(newest / name)
    for verified in (False, True):
        found = find(tmp_path, verified=verified)
        assert (found.newest, found.step) == (older, 1)
        [(skipped, reason)] = found.skipped
        assert skipped == newest and name in reason
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(newest)


def test_what_is_said_about_a_checkpoint_must_be_readable_again(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with (
        closing(AsyncWriter(tmp_path, keep=9, on_event=lambda _: None)) as writer,
        pytest.raises(CheckpointError, match="nested too deeply"),
    ):
        writer.save(1, {"x": torch.ones(2)}, {}, {"mine": deep})


def test_where_all_are_damaged_none_is_taken_and_each_is_named(tmp_path: Path) -> None:
    damaged = [save(tmp_path, step, {"x": torch.randn(500)}) for step in (1, 2)]
    for path in damaged:
        flip(path / "__0_0.distcp")
    found = find(tmp_path, verified=True)
    assert (found.newest, found.step) == (None, 0)
    assert [path for path, _ in found.skipped] == damaged
    assert find(tmp_path).newest == damaged[1], "by its sizes alone it is whole"


def test_checkpoints_of_early_versions_are_read_by_the_checksums_that_they_have(saved: Path) -> None:
    mark = json.loads((saved / "checkpoint.json").read_text())
    del mark["crc32"], mark["file_crc32"]["__0_0.distcp"]
    (saved / "checkpoint.json").write_text(json.dumps(mark))
    assert find(saved.parent, verified=True).newest == saved
    flip(saved / "state.pt")
    assert find(saved.parent, verified=True).newest is None


def test_where_there_is_nothing_nothing_is_found(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "absent"):
        found = find(directory)
        assert (found.newest, found.step, found.skipped) == (None, 0, ())
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "absent")


def test_a_mark_of_another_format_says_so(saved: Path) -> None:
    mark = json.loads((saved / "checkpoint.json").read_text())
    (saved / "checkpoint.json").write_text(json.dumps({**mark, "format": 2}))
    with pytest.raises(CheckpointError, match="format 2, and this Paceline reads format 1"):
        open_checkpoint(saved)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.eye(3).to_sparse(), "cannot store x: it is torch.sparse_coo"),
        (torch.empty(3, device="meta"), "cannot store x: it is a meta tensor"),
    ],
)
def test_a_tensor_without_plain_elements_is_refused_by_name(tmp_path: Path, tensor: Tensor, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        save(tmp_path, tensors={"x": tensor})
    assert find(tmp_path).newest is None
