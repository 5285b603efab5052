"""Files in a real S3 server: whole, in parts, gone on with after a break, and through a server that fails at random."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from object_servers import CREDENTIALS, faulty_proxy, s3_server
from paceline.storage.file_sending import FileSender, part_size
from paceline.storage.object_store import ObjectStore
from paceline.storage.probe import probe
from paceline.storage.retries import BoundedRetries, StorageError
from paceline.storage.uploads_in_parts import MultipartUpload, abort_uploads

PART = 5 << 20  # the least that S3 takes
QUICK = BoundedRetries(tries=10, first_s=0.01, longest_s=0.05)


class Note:
    """A note in memory."""

    def __init__(self, **fields: Any) -> None:
        self.fields: Mapping[str, Any] = fields

    def read(self) -> Mapping[str, Any]:
        return self.fields

    def write(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with s3_server("bucket") as url:
        yield url


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def store(
    server: str, credentials: None, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> ObjectStore:
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    made = ObjectStore(f"s3://bucket/{request.node.name}", retries=QUICK)
    made.listed()  # it keeps this server from its first request on
    return made


def file_of(path: Path, num_bytes: int) -> Path:
    path.write_bytes(random.Random(num_bytes).randbytes(num_bytes))
    return path


def test_objects_are_written_read_listed_and_deleted(store: ObjectStore) -> None:
    probe(store)
    assert store.listed() == []
    store.write("a/one", b"1234567890")
    store.write("two", b"")
    assert [(one.name, one.num_bytes) for one in store.listed()] == [("a/one", 10), ("two", 0)]
    assert store.read("a/one") == b"1234567890" and store.read("a/one", 3, 6) == b"456"
    assert store.size("two") == 0 and store.size("three") is None
    store.delete(["a/one", "three", "two"])
    assert store.listed() == [] and store.listed("a") == []


@pytest.mark.thorough
def test_a_bucket_that_is_not_there_is_found_by_the_probe(server: str, store: ObjectStore) -> None:
    absent = ObjectStore("s3://no-such-bucket/a", retries=QUICK)
    with pytest.raises(StorageError, match="make the bucket first"):
        probe(absent)
    with pytest.raises(StorageError, match="there is no bucket 'no-such-bucket'"):
        absent.listed()


def test_parts_are_as_large_as_the_number_of_parts_demands() -> None:
    assert part_size(1) == part_size(16 << 20) == 16 << 20
    assert part_size(5 << 40) * 10_000 >= 5 << 40 and part_size(5 << 40) % (1 << 20) == 0


def test_a_large_file_goes_in_parts_and_comes_back_the_same(store: ObjectStore, tmp_path: Path) -> None:
    path, note, sent = file_of(tmp_path / "file", 2 * PART + 17), Note(), list[int]()
    sender = FileSender(store, part_bytes=PART, on_sent=sent.append)
    sender.send(path, "file", note)
    sender.close()
    assert sorted(sent) == [17, PART, PART] and store.read("file") == path.read_bytes()
    assert note.fields["part_bytes"] == PART


@pytest.mark.thorough
def test_parts_that_are_there_are_not_sent_again(store: ObjectStore, tmp_path: Path) -> None:
    path, sent = file_of(tmp_path / "file", 3 * PART), list[int]()
    upload = MultipartUpload(store, "file")
    upload.begin()
    upload.send(2, path.read_bytes()[PART : 2 * PART])
    sender = FileSender(store, part_bytes=PART, on_sent=sent.append)
    sender.send(path, "file", Note(upload_id=upload.upload_id, part_bytes=PART))
    assert sent == [PART, PART] and store.read("file") == path.read_bytes()
    sent.clear()  # the upload is over: its number is of no use, and a new one begins
    sender.send(path, "file", Note(upload_id=upload.upload_id, part_bytes=PART))
    sender.close()
    assert sent == [PART] * 3


@pytest.mark.thorough
def test_an_upload_of_other_parts_is_not_gone_on_with(store: ObjectStore, tmp_path: Path) -> None:
    path = file_of(tmp_path / "file", 2 * PART + 1)
    upload = MultipartUpload(store, "file")
    upload.begin()
    upload.send(1, b"x" * PART)
    sender = FileSender(store, part_bytes=PART)
    sender.send(path, "file", Note(upload_id=upload.upload_id, part_bytes=PART + 1))
    sender.close()
    assert store.read("file") == path.read_bytes()


@pytest.mark.thorough
def test_orphans_are_aborted_and_others_left(store: ObjectStore) -> None:
    for name in ("mine", "orphan"):
        MultipartUpload(store, name).begin()
    assert abort_uploads(store, lambda name: name == "orphan") == ["orphan"]
    assert abort_uploads(store, lambda name: True) == ["mine"]


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_fails_at_random_loses_nothing(
    store: ObjectStore, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    files = {name: file_of(tmp_path / name, size) for name, size in {"small": 1000, "large": 2 * PART + 5}.items()}
    with faulty_proxy(server, seed=seed) as proxy:
        proxy.rate = 0.4
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        shaky = ObjectStore(store.address, retries=BoundedRetries(tries=30, first_s=0.005, longest_s=0.02))
        sender = FileSender(shaky, part_bytes=PART)
        for name, path in files.items():
            sender.send(path, name, Note())
        sender.close()
        assert shaky.read("large", 0, 2 * PART + 5) == files["large"].read_bytes()
        assert proxy.num_faults
    assert {name: store.read(name) for name in files} == {name: path.read_bytes() for name, path in files.items()}


@pytest.mark.thorough
def test_a_server_that_is_away_ends_the_tries_and_leaves_no_thread(
    store: ObjectStore, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path / "large", 2 * PART)
    with faulty_proxy(server) as proxy:
        proxy.is_away = True
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        sender = FileSender(ObjectStore(store.address, retries=BoundedRetries(tries=3, first_s=0.01)), part_bytes=PART)
        with pytest.raises(StorageError, match=r"could not begin to write s3://bucket/.*/large \(3 tries\)"):
            sender.send(path, "large", Note())
        sender.close()
        assert len(proxy.requests) == 3


@pytest.mark.thorough
def test_other_stores_get_whole_files(tmp_path: Path) -> None:
    store, path = ObjectStore(f"file://{tmp_path}/far/runs"), file_of(tmp_path / "file", PART + 1)
    probe(store)
    sender = FileSender(store, part_bytes=PART)
    sender.send(path, "a/file", None)
    sender.close()
    assert (tmp_path / "far/runs/a/file").read_bytes() == path.read_bytes()
    assert [one.name for one in store.listed()] == ["a/file"] and os.listdir(tmp_path / "far/runs") == ["a"]
