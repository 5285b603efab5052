"""Lists of files that differ have other words; the same list has the same ones, wherever it lies."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.data.stream_contents import contents_of


def test_names_and_their_order_count_and_the_folder_does_not() -> None:
    told = contents_of("files", ["/data/a/0.txt", "/data/b/1.txt"])
    assert re.fullmatch(r"2 files [0-9a-f]{8}", told)
    assert contents_of("files", [Path("/scratch/7/a/0.txt"), Path("/scratch/7/b/1.txt")]) == told
    assert contents_of("files", ["s3://bucket/x/a/0.txt", "s3://bucket/x/b/1.txt"]) == told
    assert contents_of("files", ["a/0.txt", "b/1.txt"]) == told
    others = [
        ["/data/b/1.txt", "/data/a/0.txt"],
        ["/data/a/0.txt", "/data/b/2.txt"],
        ["/data/a/0.txt", "/data/b/1.txt", "/data/b/2.txt"],
        ["/data/c/0.txt", "/data/d/1.txt"],
    ]
    assert len({told, *(contents_of("files", other) for other in others)}) == 5
    assert contents_of("files", ["/data/a/0.txt", "/data/b/1.txt"], also="shuffled") != told


def test_one_file_is_known_by_its_name() -> None:
    assert contents_of("files", ["/data/a.txt"]) == contents_of("files", ["a.txt"]) != contents_of("files", ["b.txt"])


def test_credentials_in_an_address_do_not_count_but_a_query_that_names_the_file_does() -> None:
    signed = [[f"https://host/{name}.tar?signature={key}" for name in "ab"] for key in (1, 2)]
    assert contents_of("archives", signed[0]) == contents_of("archives", signed[1])
    assert contents_of("files", ["https://host/?id=1", "https://host/?id=2"]) != contents_of(
        "files", ["https://host/?id=1", "https://host/?id=3"]
    )


@pytest.mark.parametrize("parts", [[range(3), range(4)], ["a", 1]])
def test_of_what_has_no_name_only_the_number_is_known(parts: list[object]) -> None:
    assert contents_of("files", parts) == "2 files"
