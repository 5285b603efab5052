"""Streams of other packages: the same steps on any workers, and a resume on another number of them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import quick
from forked import WorkersFailed, World
from paceline.data.lane_sources import as_sharded_stream
from paceline.data.sharded_stream import ShardedStream
from paceline.plan import Batch, Plan
from seen_samples import Numbers, joined, merged, seen
from stream_shards import COUNTS

LENGTHS = [23, 17, 5, 30, 15]  # of files; 90
PLAN = Plan(batch=Batch(size=10, micro=2))
Make = Callable[[], Any]


def numbers() -> list[list[int]]:
    return [[file * 1000 + number for number in range(length)] for file, length in enumerate(LENGTHS)]


def collate(samples: list[Any]) -> Any:
    values = [float(one["n"] if isinstance(one, dict) else one) for one in samples]
    return torch.tensor(values).unsqueeze(1), torch.zeros(len(values), 1)


def counted(sample: Any) -> Any:
    COUNTS["read"] += 1
    return sample


def huggingface(folder: Path) -> Make:
    datasets = pytest.importorskip("datasets", reason="a package of the dev extra")
    datasets.disable_progress_bars()
    for number, file in enumerate(numbers()):
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"n": one}) + "\n" for one in file))
    files = [str(folder / f"{number}.jsonl") for number in range(len(LENGTHS))]

    def make() -> Any:
        stream = datasets.load_dataset(
            "json", data_files=files, split="train", streaming=True, cache_dir=str(folder / "cache")
        )
        return stream.map(counted).filter(lambda sample: sample["n"] >= 0)

    return make


def archives_in(folder: Path) -> list[str]:
    for number, file in enumerate(numbers()):
        with tarfile.open(folder / f"{number}.tar", "w") as archive:
            for one in file:
                about = tarfile.TarInfo(f"{one:06}.n.txt")
                data = str(one).encode()
                about.size = len(data)
                archive.addfile(about, io.BytesIO(data))
    return [str(folder / f"{number}.tar") for number in range(len(LENGTHS))]


def number_in(sample: Any) -> dict[str, int]:
    return counted({"n": int(sample["n.txt"])})


def webdataset(folder: Path, shuffle: Any = False) -> Make:
    package, archives = pytest.importorskip("webdataset", reason="a package of the dev extra"), archives_in(folder)
    return lambda: package.WebDataset(archives, shardshuffle=shuffle).decode().map(number_in)


def shuffled_webdataset(folder: Path) -> Make:
    return webdataset(folder, 100)


def nodes(folder: Path) -> Make:
    package = pytest.importorskip("torchdata.nodes", reason="a package of the dev extra")

    def make() -> Any:
        root = package.IterableWrapper(joined(numbers()))  # type: ignore[arg-type]  # of whole numbers
        return package.Loader(package.Prefetcher(package.Mapper(root, counted), prefetch_factor=2))

    return make


class Stateful(IterableDataset[Any]):
    """As torchdata's StatefulDataLoader wants it."""

    given = 0

    def __iter__(self) -> Iterator[Any]:
        every = joined(numbers())  # type: ignore[arg-type]  # of whole numbers
        while self.given < len(every):
            self.given += 1
            yield counted(every[self.given - 1])
        self.given = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


def stateful_loader(folder: Path) -> Make:
    package = pytest.importorskip("torchdata.stateful_dataloader", reason="a package of the dev extra")
    return lambda: package.StatefulDataLoader(Stateful(), batch_size=10, collate_fn=collate)


def litdata(folder: Path) -> Make:
    package = pytest.importorskip("litdata", reason="it asks for another torch than the tests have")
    _write_chunks(package, folder)
    return lambda: package.StreamingDataset(str(folder / "chunks"), transform=counted)


def shuffled_litdata(folder: Path) -> Make:
    package = pytest.importorskip("litdata", reason="it asks for another torch than the tests have")
    _write_chunks(package, folder)
    return lambda: package.StreamingDataset(str(folder / "chunks"), shuffle=True, transform=counted)


def _write_chunks(package: Any, folder: Path) -> None:
    cache = package.streaming.Cache(str(folder / "chunks"), chunk_size=13)
    for place, one in enumerate(joined(numbers())):  # type: ignore[arg-type]  # of whole numbers
        cache[place] = {"n": one}
    cache.done()
    cache.merge()


ALL = [huggingface, webdataset, shuffled_webdataset, nodes, stateful_loader, litdata, shuffled_litdata]


@pytest.mark.parametrize(
    ("kind", "loaders"),
    [
        (webdataset, 0),
        *[quick.further(one, 0) for one in ALL[2:]],
        *[quick.further(one, 2) for one in (huggingface, webdataset)],
    ],
)
def test_the_same_steps_on_any_workers_and_after_a_resume(
    world: World, tmp_path: Path, kind: Any, loaders: int
) -> None:
    make = kind(tmp_path)

    def run(worker: Any, **options: Any) -> tuple[dict[Any, list[float]], int]:
        COUNTS["read"] = 0
        return seen(worker, make(), collate=collate, epochs=2, **options), COUNTS["read"]

    alone = merged([world.one_process(run, PLAN)[0]])
    for epoch in (0, 1):
        of_epoch = [value for (at, _), values in alone.items() if at == epoch for value in values]
        assert sorted(of_epoch) == joined(numbers())  # type: ignore[arg-type]  # of whole numbers
    before = merged([steps for steps, _ in world(run, 2, PLAN, max_steps=13)])
    after = world(lambda worker: run(worker, loaders=loaders), 3, PLAN)
    assert {**before, **merged([steps for steps, _ in after])} == alone
    if "shuffled" in kind.__name__:
        assert joined(alone[0, step] for step in range(1, 10)) != joined(alone[1, step] for step in range(10, 19))


def test_a_resume_of_a_streaming_dataset_reads_nearly_nothing_again(world: World, tmp_path: Path) -> None:
    make = huggingface(tmp_path)

    def run(worker: Any) -> int:
        COUNTS["read"] = 0
        seen(worker, make(), collate=collate)
        return COUNTS["read"]

    plan = Plan(batch=Batch(size=4, micro=2))
    world(run, 2, plan, max_steps=20)
    assert world(run, 1, plan, max_steps=21)[0] <= (4 + 2) * 4 + 4, "the states are of step 17"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda stream: stream.shuffle(10), r"has \.shuffle\(\): its buffer is in no checkpoint"),
        (lambda stream: stream.compose(_filters().detshuffle(10)), r"has \.detshuffle\(\): its buffer"),
        (lambda stream: stream.batched(4), r"has \.batched\(\): a step's samples are the plan's"),
        (lambda stream: stream.slice(50), r"has \.slice\(\): archives are read each by itself"),
        (lambda stream: stream.rsample(0.5), r"has \.rsample\(\): which samples .* choose by the key"),
        (lambda stream: stream.mcached(), r"has \.mcached\(\): it would give the first archive's samples"),
        (lambda stream: stream.repeat(), r"\.repeat\(\) or \.with_epoch\(\): leave it out"),
        (lambda stream: stream.with_epoch(50), r"\.repeat\(\) or \.with_epoch\(\): leave it out"),
    ],
)
def test_what_of_webdataset_can_not_be_divided_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    package = pytest.importorskip("webdataset", reason="a package of the dev extra")
    stream = package.WebDataset(archives_in(tmp_path), shardshuffle=False)
    with pytest.raises(ValueError, match=says):
        as_sharded_stream(change(stream))
    with pytest.raises(ValueError, match="has 'islice' between its list of archives and their opening"):
        as_sharded_stream(package.DataPipeline(stream.pipeline[0], _filters().slice(2), *stream.pipeline[1:]))
    with pytest.raises(ValueError, match="begins with ResampledShards"):
        as_sharded_stream(package.DataPipeline(package.ResampledShards(archives_in(tmp_path))))
    with pytest.raises(ValueError, match="pass its WebDataset"):
        as_sharded_stream(package.WebLoader(stream))


def _filters() -> Any:
    return pytest.importorskip("webdataset.filters", reason="a package of the dev extra")


@pytest.mark.parametrize(("shuffle", "is_in_order"), [(False, True), (0, True), (100, False)])
def test_archives_come_in_their_order_unless_they_are_to_be_shuffled(
    tmp_path: Path, shuffle: Any, is_in_order: bool
) -> None:
    stream: Any = as_sharded_stream(webdataset(tmp_path, shuffle)())
    for epoch in (0, 1):
        lane = stream.make(0, 1)
        lane.set_epoch(epoch)
        found = [sample["n"] for sample in lane]
        assert (found == joined(numbers())) == is_in_order  # type: ignore[arg-type]  # of whole numbers
        assert sorted(found) == joined(numbers())  # type: ignore[arg-type]
    assert stream.contents.startswith("5 archives ")


def test_samples_that_are_taken_apart_and_a_buffer_of_none_are_no_reason_to_refuse(tmp_path: Path) -> None:
    make = webdataset(tmp_path)
    stream: Any = as_sharded_stream(make().map(lambda one: [one, one]).unlisted().compose(_filters().shuffle(0)))
    assert len(list(stream.make(0, 5))) == 2 * LENGTHS[0]


def test_archives_that_are_shuffled_are_another_order(tmp_path: Path) -> None:
    first, other = (as_sharded_stream(webdataset(tmp_path, shuffle)()) for shuffle in (False, 100))
    assert first is not None and other is not None and first.contents != other.contents


def test_a_shuffle_buffer_of_a_streaming_dataset_is_refused(world: World, tmp_path: Path) -> None:
    make = huggingface(tmp_path)

    def run(worker: Any) -> Any:
        return seen(worker, make().shuffle(seed=1, buffer_size=20), collate=collate)

    with pytest.raises(WorkersFailed, match="does not bring back the samples behind it"):
        world(run, 1, Plan(batch=Batch(size=4, micro=2)), save_at_end=False)


def test_a_stateful_loader_of_numbers_has_its_kind_of_order() -> None:
    package = pytest.importorskip("torchdata.stateful_dataloader", reason="a package of the dev extra")
    from paceline.worker.data.data_request import read_request

    loader = package.StatefulDataLoader(Numbers(20), batch_size=4, shuffle=True)
    request = read_request(loader, Batch())
    assert request.shuffle is True and request.draws is None and request.batch_size == 4
    assert "its state_dict() is not needed" in request.takeover
    in_order = package.StatefulDataLoader(Numbers(20), batch_size=4)
    assert read_request(in_order, Batch()).shuffle is False
    assert isinstance(as_sharded_stream(ShardedStream(lambda shard, num: [], shards=1)), ShardedStream)
