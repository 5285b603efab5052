"""Text from a user's data or another host cannot act on a terminal; a run's directory is its user's alone."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.events import Reported
from paceline.monitor.console.event_lines import event_line
from paceline.monitor.console.plain import PlainConsole
from paceline.private_files import make_run_directory, read_private, write_private
from paceline.units import name_text, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("loss 0.1\n\tline", "loss 0.1\n\tline"),
        ("\x1b]0;title\x07", "\\x1b]0;title\\x07"),
        ("\x1b[2J\x9b31m\r", "\\x1b[2J\\x9b31m\\r"),
        ("file\u202etxt.exe", "file\\u202etxt.exe"),
        ("größe \u4e2d", "größe \u4e2d"),
    ],
)
def test_control_characters_are_spelled_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_colors_stay_where_they_may_and_nothing_else_does() -> None:
    assert printable("\x1b[31;1mred\x1b[0m\x1b[2J", colors=True) == "\x1b[31;1mred\x1b[0m\\x1b[2J"


def test_a_metrics_name_reaches_the_console_without_its_control_characters() -> None:
    stream = io.StringIO()
    line = event_line(Reported(step=1, metrics={"\x1b[2Jacc": 0.5}))
    assert line is not None
    PlainConsole(stream).show(printable(line))
    assert "\x1b" not in stream.getvalue() and "acc 0.5" in stream.getvalue()


def test_a_runs_directory_is_private_unless_the_user_made_it(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        make_run_directory(tmp_path / "runs" / "one")
        assert stat.S_IMODE((tmp_path / "runs" / "one").stat().st_mode) == 0o700
        (tmp_path / "own").mkdir(mode=0o750)
        make_run_directory(tmp_path / "own")
        assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o750
        os.umask(0)
        for _ in range(2):
            write_private(tmp_path / "program.pkl", b"x")
            assert stat.S_IMODE((tmp_path / "program.pkl").stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: gives a file to another user")
def test_a_pickle_that_another_user_put_in_a_runs_directory_is_not_read(tmp_path: Path) -> None:
    place = tmp_path / "program.pkl"
    write_private(place, b"own")
    assert read_private(place) == b"own"
    os.chown(place, 65534, 65534)
    with pytest.raises(LaunchError, match="belongs to user 65534"):
        read_private(place)
    place.rename(tmp_path / "aside")
    place.symlink_to(tmp_path / "aside")
    with pytest.raises(OSError, match="symbolic link"):
        read_private(place)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("val/loss é", "val/loss é"),
        ("a\nfailed", "a\\nfailed"),
        ("\ud800", "\\ud800"),
        ("\x1b[31m", "\\x1b[31m"),
        ("x" * 300, "x" * 197 + "..."),
    ],
)
def test_names_are_one_short_line_that_can_be_encoded(name: str, shown: str) -> None:
    assert name_text(name) == shown
    name_text(name).encode()
