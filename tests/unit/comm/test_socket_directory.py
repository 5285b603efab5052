"""Directories of sockets are private, and those of a family that has ended are removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.comm.messages import socket_directory
from paceline.comm.messages.socket_directory import make_socket_directory, remove_socket_directories


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="short-", dir="/tmp") as made:
        monkeypatch.setattr(tempfile, "tempdir", made)
        yield Path(made)


def test_what_a_family_has_left_is_removed_and_nothing_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Path]()
    for family in ("0123", "4567", ""):
        monkeypatch.setenv("PACELINE_FAMILY", family)
        made.append(make_socket_directory())
        (made[-1] / "s").touch()
        assert made[-1].stat().st_mode & 0o777 == 0o700
    remove_socket_directories("0123")
    assert sorted(place.iterdir()) == sorted(made[1:])
    remove_socket_directories("")  # not known: nobody's
    assert sorted(place.iterdir()) == sorted(made[1:])


def test_a_strangers_directory_of_the_same_name_is_left_alone_and_ends_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_FAMILY", "0123")
    make_socket_directory()
    deep = place / "paceline-0123-own"
    subprocess.run(["mkdir", "-p", f"{deep}/{'d/' * 1500}"], check=True)  # deeper than shutil.rmtree can go
    theirs = place / "paceline-0123-theirs"
    theirs.mkdir()
    (theirs / "s").touch()
    if os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    remove_socket_directories("0123")
    assert {path.name for path in place.iterdir()} >= {deep.name}
    assert os.geteuid() != 0 or (theirs / "s").exists()
    subprocess.run(["rm", "-r", deep], check=True)  # nor can pytest


def test_what_a_family_has_left_that_was_killed_as_a_whole_is_removed_by_the_next_one(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = dict[str, Path]()
    with contextlib.ExitStack() as stack:
        for name in ("abandoned", "of_loaders", "served", "young", "other"):
            monkeypatch.setenv("PACELINE_FAMILY", name)
            made[name] = make_socket_directory()
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(str(made[name] / "s"))
            sock.listen() if name == "served" else sock.close()
            if name == "of_loaders":
                (made[name] / "listener-abcd1234").touch()
            if name != "young":
                os.utime(made[name], (1e9, 1e9))
        (made["other"] / "data").touch()
        os.utime(made["other"], (1e9, 1e9))
        remove_socket_directories("89ab")
    assert set(place.iterdir()) == {made[name] for name in ("served", "young", "other")}


def test_a_kill_while_it_is_removed_leaves_nothing_once_the_next_process_of_the_family_has_removed_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(directory: Path, now: float) -> bool:
        raise KeyboardInterrupt  # like SIGKILL, no handler of OSError goes on

    monkeypatch.setenv("PACELINE_FAMILY", "0123")
    make_socket_directory()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(socket_directory, "_is_abandoned", kill)
        remove_socket_directories("0123")
    assert len(list(place.iterdir())) == 2
    remove_socket_directories("0123")
    assert list(place.iterdir()) == []


def test_a_socket_has_room_whatever_the_temporary_directory_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_FAMILY", family := secrets.token_hex(8))
    longest = tmp_path / ("x" * (120 - len(str(tmp_path))))
    longest.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(longest))
    made = make_socket_directory()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(made / "s"))
    remove_socket_directories(family)
    assert not made.exists()
