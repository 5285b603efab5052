"""Blocks of Azure's blobs: only this upload's own count, and a commit whose answer was lost may be asked for again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest

from paceline.storage.object_store import ObjectStore
from paceline.storage.retries import BoundedRetries
from paceline.storage.uploads_in_parts import BlockUpload


@dataclasses.dataclass(frozen=True)
class Block:
    id: str
    size: int


class Azure:
    """One blob in memory, and a store and a client of it."""

    def __init__(self) -> None:
        self.files = self.service_client = self
        self.staged: dict[str, bytes] = {}
        self.committed: dict[str, bytes] = {}
        self.is_answer_lost = False

    def bucket_and_key(self, name: str) -> tuple[str, str]:
        return "container", name

    def run_async(self, request: Callable[[], Any]) -> Any:
        try:
            request().send(None)
        except StopIteration as over:
            return over.value
        raise AssertionError("it awaits")

    def request(self, what: str, name: str, request: Callable[..., Any], *arguments: Any) -> Any:
        return BoundedRetries(sleep=lambda _: None).call(what, f"az://container/{name}", lambda: request(*arguments))

    def get_blob_client(self, container: str, name: str) -> Azure:
        return self

    async def __aenter__(self) -> Azure:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def stage_block(self, block: str, data: bytes, *, length: int, **limits: Any) -> None:
        assert length == len(data)
        self.staged[block] = data

    async def get_block_list(self, which: str, **limits: Any) -> tuple[list[Block], list[Block] | None]:
        if not self.staged and not self.committed:
            raise FileNotFoundError
        committed, staged = ([Block(*one) for one in sizes(each)] for each in (self.committed, self.staged))
        return committed, staged or None

    async def commit_block_list(self, blocks: list[str], **limits: Any) -> None:
        known = {**self.committed, **self.staged}
        self.committed, self.staged = {block: known[block] for block in blocks}, {}
        if self.is_answer_lost:
            self.is_answer_lost = False
            raise ConnectionError("the answer was lost")


def sizes(blocks: dict[str, bytes]) -> list[tuple[str, int]]:
    return [(name, len(data)) for name, data in blocks.items()]


@pytest.fixture
def azure() -> Azure:
    return Azure()


def upload_to(azure: Azure) -> BlockUpload:
    return BlockUpload(cast(ObjectStore, azure), "file")


def test_blocks_become_a_blob_in_the_order_of_their_numbers(azure: Azure) -> None:
    upload = upload_to(azure)
    upload.begin()
    tags = {number: upload.send(number, data) for number, data in {2: b"two", 10: b"ten", 1: b"one"}.items()}
    assert len({len(tag) for tag in tags.values()}) == 1  # Azure refuses names of several lengths in one blob
    azure.is_answer_lost = True
    upload.complete(tags)
    assert b"".join(azure.committed.values()) == b"onetwoten"


def test_an_upload_goes_on_with_its_own_blocks_and_no_others(azure: Azure) -> None:
    other, upload = upload_to(azure), upload_to(azure)
    other.begin()
    other.send(1, b"other")
    upload.begin()
    upload.send(2, b"mine")
    later = upload_to(azure)
    assert later.go_on(upload.upload_id) == {2: (f"{upload.upload_id}-00002", 4)}
    assert later.send(1, b"1") == f"{upload.upload_id}-00001"


def test_a_blob_that_was_made_of_them_already_is_made_again_of_the_same(azure: Azure) -> None:
    upload = upload_to(azure)
    upload.begin()
    upload.complete({1: upload.send(1, b"one")})
    later = upload_to(azure)
    there = later.go_on(upload.upload_id)
    later.complete({number: tag for number, (tag, _) in there.items()})
    assert list(azure.committed.values()) == [b"one"]


def test_nothing_is_there_of_a_blob_that_is_not(azure: Azure) -> None:
    assert upload_to(azure).go_on("0" * 32) == {}
