"""Directories of sockets are private, and those of a family that has ended are removed."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import tempfile
from pathlib import Path

import pytest

from paceline.comm.messages.socket_directory import make_socket_directory, remove_socket_directories


def test_what_a_family_has_left_is_removed_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = list[Path]()
    for family in ("0123", "4567", ""):
        monkeypatch.setenv("PACELINE_FAMILY", family)
        made.append(make_socket_directory())
        (made[-1] / "s").touch()
        assert made[-1].stat().st_mode & 0o777 == 0o700
    remove_socket_directories("0123")
    assert sorted(tmp_path.iterdir()) == sorted(made[1:])
    remove_socket_directories("")  # not known: nobody's
    assert sorted(tmp_path.iterdir()) == sorted(made[1:])


def test_what_a_family_has_left_that_was_killed_as_a_whole_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = dict[str, Path]()
    with contextlib.ExitStack() as stack:
        for name in ("abandoned", "served", "young", "other"):
            monkeypatch.setenv("PACELINE_FAMILY", name)
            made[name] = make_socket_directory()
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(str(made[name] / "s"))
            sock.listen() if name == "served" else sock.close()
            if name != "young":
                os.utime(made[name], (1e9, 1e9))
        (made["other"] / "data").touch()
        os.utime(made["other"], (1e9, 1e9))
        remove_socket_directories("89ab")
    assert set(tmp_path.iterdir()) == {made[name] for name in ("served", "young", "other")}


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
