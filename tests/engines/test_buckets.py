"""Files in real servers of S3, Google Cloud Storage and Azure: the same tests for each, also through a shaky proxy."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from bucket_servers import STORES, BucketServer, bucket_server, connection_string
from object_servers import faulty_proxy
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from paceline.checkpoint.remote.uploader import Uploader
from paceline.storage.file_sending import FileSender
from paceline.storage.object_store import ObjectStore
from paceline.storage.probe import probe
from paceline.storage.retries import BoundedRetries, StorageError
from remote_runs import complete_steps, put_checkpoint

PART = 5 << 20  # the least that S3 takes
QUICK = BoundedRetries(tries=10, first_s=0.01, longest_s=0.05)


class Note:
    """A note in memory."""

    def __init__(self) -> None:
        self.fields: Mapping[str, Any] = {}

    def read(self) -> Mapping[str, Any]:
        return self.fields

    def write(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)


@pytest.fixture(scope="module", params=STORES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketServer]:
    with bucket_server(request.param, tmp_path_factory.mktemp("server")) as server:
        yield server


def store_at(
    server: BucketServer,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    url: str | None = None,
    retries: BoundedRetries = QUICK,
) -> ObjectStore:
    """Return a store that keeps this server, or proxy, from its first request on."""
    for variable, value in server.environment(url).items():
        monkeypatch.setenv(variable, value)
    return ObjectStore(server.address(name), retries=retries)


@pytest.fixture
def store(server: BucketServer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ObjectStore:
    made = store_at(server, monkeypatch, request.node.originalname)
    made.listed()
    return made


def file_of(path: Path, num_bytes: int) -> Path:
    path.write_bytes(random.Random(num_bytes).randbytes(num_bytes))
    return path


def send(store: ObjectStore, path: Path, name: str, note: Note | None = None) -> list[int]:
    """Send a file in parts; returns the bytes of each request."""
    sent = list[int]()
    sender = FileSender(store, part_bytes=PART, on_sent=sent.append)
    try:
        sender.send(path, name, note)
    finally:
        sender.close()
    return sent


def test_objects_are_written_read_listed_and_deleted(store: ObjectStore) -> None:
    probe(store)
    assert store.listed() == []
    store.write("a/one", b"1234567890")
    store.write("a b/ü%2F+&?.json", b"{}")
    store.write("two", b"")
    assert [(one.name, one.num_bytes) for one in store.listed()] == [("a b/ü%2F+&?.json", 2), ("a/one", 10), ("two", 0)]
    assert [one.name for one in store.listed("a")] == ["a/one"]
    assert store.read("a/one") == b"1234567890" and store.read("a/one", 3, 6) == b"456" and store.read("two") == b""
    store.write("a/one", b"other")
    assert store.read("a/one") == b"other" and store.size("a/one") == 5
    assert store.size("two") == 0 and store.size("three") is None
    with pytest.raises(FileNotFoundError):
        store.read("three")
    store.delete(["a/one", "three", "two", "a b/ü%2F+&?.json"])
    assert store.listed() == [] and store.listed("a") == []


def test_a_bucket_that_is_not_there_is_found_by_the_probe(server: BucketServer, store: ObjectStore) -> None:
    absent = ObjectStore(f"{server.store}://no-such-bucket/a", retries=QUICK)
    with pytest.raises(StorageError, match="make the bucket first"):
        probe(absent)
    with pytest.raises(StorageError, match="there is no bucket 'no-such-bucket'"):
        absent.listed()


def test_a_large_file_goes_in_parts_and_comes_back_the_same(store: ObjectStore, tmp_path: Path) -> None:
    path, note = file_of(tmp_path / "file", 2 * PART + 17), Note()
    assert sorted(send(store, path, "file", note)) == [17, PART, PART] and store.read("file") == path.read_bytes()
    smaller = file_of(tmp_path / "smaller", PART + 1)
    send(store, smaller, "file", note)  # what is noted of another file is of no use
    assert store.read("file") == smaller.read_bytes()


def test_parts_that_are_there_are_not_sent_again(
    server: BucketServer, store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, note = file_of(tmp_path / "file", 4 * PART), Note()
    with faulty_proxy(server.url) as proxy:
        proxy.most_part_bytes, proxy.num_large, proxy.held_s = PART - 1, 2, 0.0
        once = BoundedRetries(tries=1)
        broken = store_at(server, monkeypatch, "parts", url=proxy.url, retries=once)
        sender = FileSender(broken, part_bytes=PART, threads=1)
        with pytest.raises(StorageError, match="could not write a part of"):
            sender.send(path, "file", note)
        sender.close()
        assert store_at(server, monkeypatch, "parts").size("file") is None  # the object is there whole, or not at all
        proxy.most_part_bytes = None
        assert send(store_at(server, monkeypatch, "parts", url=proxy.url), path, "file", note) == [PART, PART]
    assert store_at(server, monkeypatch, "parts").read("file") == path.read_bytes()


def test_an_upload_that_the_store_has_forgotten_begins_again(
    server: BucketServer, store: ObjectStore, tmp_path: Path
) -> None:
    path, note = file_of(tmp_path / "file", 2 * PART), Note()
    send(store, path, "one", note)
    note.fields = {
        key: value if key in ("part_bytes", "num_bytes") else f"{value}0" for key, value in note.fields.items()
    }
    assert sorted(send(store, path, "two", note)) == [PART, PART] and store.read("two") == path.read_bytes()


@pytest.mark.parametrize("seed", range(3))
def test_a_server_that_fails_at_random_loses_nothing(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    files = {name: file_of(tmp_path / name, size) for name, size in {"small": 1000, "large": 2 * PART + 5}.items()}
    folder = f"shaky-{seed}"
    with faulty_proxy(server.url, seed=seed) as proxy:
        proxy.rate = 0.4
        patient = BoundedRetries(tries=30, first_s=0.005, longest_s=0.02)
        shaky = store_at(server, monkeypatch, folder, url=proxy.url, retries=patient)
        for name, path in files.items():
            send(shaky, path, name, Note())
        assert shaky.read("large", 0, 2 * PART + 5) == files["large"].read_bytes()
        assert [one.name for one in shaky.listed()] == ["large", "small"]
        shaky.write("gone", b"x")
        shaky.delete(["gone"])
        assert proxy.num_faults
    store = store_at(server, monkeypatch, folder)
    assert {one.name: store.read(one.name) for one in store.listed()} == {
        name: path.read_bytes() for name, path in files.items()
    }


def test_a_server_that_is_away_ends_the_tries_after_as_many_requests(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = file_of(tmp_path / "large", 2 * PART)
    with faulty_proxy(server.url) as proxy:
        proxy.is_away = True
        away = store_at(server, monkeypatch, "away", url=proxy.url, retries=BoundedRetries(tries=3, first_s=0.01))
        for ask in (lambda: away.write("a", b"1"), lambda: away.read("a", 0, 1), lambda: away.size("a"), away.listed):
            before = len(proxy.requests)
            with pytest.raises(StorageError, match=r"\(3 tries\).*Check the network"):
                ask()
            # a look takes a package two requests, and aiohttp sends one again where its connection was closed
            assert before + 3 <= len(proxy.requests) <= before + 12
        with pytest.raises(StorageError, match=r"(begin to write|write a part of) .*/large \(3 tries\)"):
            send(away, path, "large", Note())


def test_checkpoints_appear_whole_and_the_newest_stay(
    server: BucketServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_proxy(server.url, seed=9) as proxy:
        proxy.rate = 0.2
        patient = BoundedRetries(tries=30, first_s=0.005, longest_s=0.02)
        remote = RemoteCheckpoints(store_at(server, monkeypatch, "kept", url=proxy.url, retries=patient))
        for step in (1, 2, 3, 4):
            put_checkpoint(tmp_path, step, num_bytes=300_000)
            uploader = Uploader(tmp_path, remote, keep=2, part_bytes=PART)
            while uploader.waiting():
                report = uploader.turn()
                assert report is None or report.reason is None, report
        assert complete_steps(remote) == [3, 4] and [one.step for one in remote.look()] == [3, 4]


def test_wrong_credentials_are_told_with_where_they_come_from(
    server: BucketServer, store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    if server.store != "az":
        pytest.skip("the servers of S3 and Google that run here ask for no credentials")
    wrong = connection_string(server.url, key="d3Jvbmc=")
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", wrong)
    with pytest.raises(StorageError, match=r"\(1 try\).*AZURE_STORAGE_CONNECTION_STRING") as caught:
        probe(ObjectStore(server.address("wrong"), retries=QUICK))
    assert "d3Jvbmc" not in str(caught.value)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    with pytest.raises(StorageError, match=r"az://bucket/wrong cannot be used.*AZURE_STORAGE_ACCOUNT_NAME"):
        ObjectStore(server.address("wrong"))
