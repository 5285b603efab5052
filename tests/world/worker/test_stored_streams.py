"""Streams of files in a real S3 server that fails at random: every sample once, and a bounded number of tries."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from forked import World
from object_servers import CREDENTIALS, faulty_proxy, s3_server
from paceline import PlanError, ShardedStream, open_file
from paceline.plan import Batch, Plan
from paceline.storage import reading
from paceline.storage.object_store import ObjectStore
from paceline.storage.reading import files_like
from paceline.storage.retries import BoundedRetries, StorageError
from seen_samples import joined, merged, seen

LENGTHS = [23, 17, 0, 30, 15]  # of files; 85
PLAN = Plan(batch=Batch(size=10, micro=2))
SHORT = BoundedRetries(first_s=0.01, longest_s=0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server("bucket") as url:
        yield url


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    """Five files of lines in the bucket, and one in a folder below."""
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": server}.items():
        monkeypatch.setenv(name, value)
    reading._stores.clear()
    store = ObjectStore("s3://bucket/data", retries=SHORT)
    for file, length in enumerate(LENGTHS):
        lines = [json.dumps({"n": file * 1000 + number}) + "\n" for number in range(length)]
        store.write(f"{file}.jsonl", "".join(lines).encode())
    store.write("old/9.jsonl", b"{}")


def numbers_in(address: Any) -> Iterator[Any]:
    with open_file(address, block_bytes=100) as file:  # many requests
        for line in file:
            yield torch.tensor([float(json.loads(line)["n"])]), torch.tensor([0.0])


def everything() -> list[float]:
    return [file * 1000.0 + number for file, length in enumerate(LENGTHS) for number in range(length)]


@pytest.mark.parametrize("loaders", [1])
def test_each_sample_comes_once_though_requests_fail(
    world: World, monkeypatch: pytest.MonkeyPatch, server: str, loaders: int
) -> None:
    def run(worker: Any, **options: Any) -> Any:
        return seen(worker, ShardedStream.of_files("s3://bucket/data/*.jsonl", numbers_in), **options)

    alone = merged([world.one_process(run, PLAN)])
    assert sorted(joined(alone.values())) == everything()
    with faulty_proxy(server, seed=3) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.rate = 0.15
        before = merged(world(lambda worker: run(worker, loaders=loaders), 2, PLAN, max_steps=4))
        after = merged(world(run, 3, PLAN))
        assert proxy.num_faults > 5
    assert {**before, **after} == alone


def test_a_file_in_a_store_reads_as_one_on_disk(tmp_path: Path) -> None:
    data = os.urandom(300_001)
    (tmp_path / "data.bin").write_bytes(data)
    ObjectStore("s3://bucket/data", retries=SHORT).write("data.bin", data)
    with open_file("s3://bucket/data/data.bin", block_bytes=70_000) as far, open_file(tmp_path / "data.bin") as near:
        for offset, whence, count in ((0, 0, 10), (-7, 2, 100), (150_000, 0, 90_000), (5, 1, 3), (400_000, 0, 5)):
            assert far.seek(offset, whence) == near.seek(offset, whence)
            assert far.read(count) == near.read(count)
        far.seek(0)
        assert far.read() == data and far.seekable() and not far.writable()


def test_patterns_name_files_in_order(tmp_path: Path) -> None:
    assert files_like("s3://bucket/data/*.jsonl") == [f"s3://bucket/data/{n}.jsonl" for n in range(5)]
    assert files_like("s3://bucket/data/**/[09].jsonl") == [
        "s3://bucket/data/0.jsonl",
        "s3://bucket/data/old/9.jsonl",
    ]
    assert files_like("s3://bucket/data/7.jsonl") == ["s3://bucket/data/7.jsonl"]
    (tmp_path / "b.txt").touch()
    (tmp_path / "a.txt").touch()
    assert files_like(str(tmp_path / "*.txt")) == [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    with pytest.raises(ValueError, match=r"no file is like 's3://bucket/data/\*\.txt'; correct the pattern"):
        ShardedStream.of_files("s3://bucket/data/*.txt", numbers_in)


def test_what_can_not_be_read_says_why(monkeypatch: pytest.MonkeyPatch, server: str) -> None:
    with pytest.raises(FileNotFoundError, match="there is no s3://bucket/data/none"):
        open_file("s3://bucket/data/none")
    with pytest.raises(PlanError, match=r"paceline\.open_file\(\) names a user or a key before '@'"):
        open_file("s3://key@bucket/data/0.jsonl")
    with faulty_proxy(server) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = ObjectStore("s3://bucket/data", retries=SHORT)
        proxy.is_away = True
        with pytest.raises(
            StorageError, match=r"could not read s3://bucket/data/0\.jsonl \(6 tries\).*Check the network"
        ):
            store.read("0.jsonl", 0, 10)
