"""A file that is looked at often is read only where it has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.pool.cached_file import CachedFile


class Reads:
    """A file that holds a number, and how often it was read."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        self.file = CachedFile(path, self._load)

    def _load(self) -> int | None:
        self.count += 1
        return int(self.path.read_text()) if self.path.exists() else None

    def replace(self, text: str) -> None:
        partial = self.path.with_suffix(".new")
        partial.write_text(text)
        partial.replace(self.path)


def test_it_is_read_again_when_it_comes_changes_and_goes(tmp_path: Path) -> None:
    reads = Reads(tmp_path / "number")
    assert (reads.file.read(), reads.file.read(), reads.count) == (None, None, 1)
    reads.replace("1")
    assert (reads.file.read(), reads.file.read(), reads.count) == (1, 1, 2)
    reads.replace("2")
    assert (reads.file.read(), reads.count) == (2, 3)
    reads.path.write_text("3")  # in place, as where the disk is full
    os.utime(reads.path, ns=(1, 1))
    assert (reads.file.read(), reads.count) == (3, 4)
    reads.path.unlink()
    assert (reads.file.read(), reads.count) == (None, 5)


def test_what_could_not_be_read_is_tried_again(tmp_path: Path) -> None:
    reads = Reads(tmp_path / "number")
    reads.replace("x")
    for count in (1, 2):
        with pytest.raises(ValueError, match="x"):
            reads.file.read()
        assert reads.count == count
    reads.replace("4")
    assert reads.file.read() == 4


def test_a_change_while_it_is_read_is_not_missed(tmp_path: Path) -> None:
    path = tmp_path / "number"
    path.write_text("1")

    def load() -> str:
        found = path.read_text()
        if found == "1":
            path.write_text("22")
        return found

    file = CachedFile(path, load)
    assert [file.read(), file.read()] == ["1", "22"]
