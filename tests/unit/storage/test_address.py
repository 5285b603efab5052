"""Addresses of object storage: what is one, and what is refused before anything starts."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PlanError
from paceline.plan import Job
from paceline.storage.address import check_address, is_address, joined, plain_path


def test_an_address_is_told_from_a_path() -> None:
    assert is_address("s3://bucket/a") and is_address("gs://b/c")
    assert not is_address("runs/first") and not is_address("/s3://x") and not is_address(None)


def test_an_address_survives_pathlib() -> None:
    assert plain_path(Path("s3://bucket/a/b.safetensors")) == "s3://bucket/a/b.safetensors"
    assert plain_path("s3://bucket/a") == "s3://bucket/a"
    assert plain_path(Path("file:///tmp/x")) == "file:///tmp/x"
    assert plain_path(Path("runs/a:b")) is None and plain_path(Path("c:/x")) is None


def test_names_are_put_below_an_address() -> None:
    assert joined("s3://bucket/a/", "b", "c") == "s3://bucket/a/b/c"


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("bucket/path", "must be an address such as"),
        ("s3://bucket", "a place of its own"),
        ("s3://", "a place of its own"),
        ("s3://key:secret@bucket/path", "leave them out here"),
        ("s3://bucket/path?key=1", "plain address"),
        ("nosuch://bucket/path", "cannot use nosuch://"),
    ],
)
def test_what_is_no_address_is_refused_with_the_remedy(address: str, said: str) -> None:
    with pytest.raises(PlanError, match=said) as caught:
        check_address(address, option="--remote-dir")
    assert "--remote-dir" in str(caught.value) and "secret" not in str(caught.value).replace("secrets", "")


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name in ("gcsfs", "adlfs") else find(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(PlanError, match=r"package gcsfs .* pip install 'paceline\[gs\]'"):
        check_address("gs://bucket/path", option="remote_dir")
    with pytest.raises(PlanError, match=r"package adlfs .* pip install 'paceline\[az\]'"):
        check_address("az://bucket/path", option="remote_dir")
    assert check_address("s3://bucket/path/", option="remote_dir") == "s3://bucket/path"


def test_a_job_on_several_hosts_names_its_directory() -> None:
    with pytest.raises(PlanError, match="needs a run_dir"):
        Job(program="t.py", workers=2, hosts=2, head="a:29500", remote_dir="s3://b/c")
    assert Job(program="t.py", hosts=2, workers=2, head="a:29500", run_dir="r", remote_dir="s3://b/c").remote_dir
