"""Loader processes that are killed, with their worker or alone, leave no files."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from programs import PACELINE, TRAIN, Announcements, command, write_program

LONG = TRAIN.replace("randn(48, 6)", "randn(480_000, 6)")  # an epoch that is not over when a process is killed
LOADERS = LONG.replace("epochs=options.epochs)", "epochs=options.epochs, loaders=2)")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """One with a name that is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="short-") as made:
        yield Path(made)


@pytest.mark.parametrize("victim", ["worker", "loader"])
def test_nothing_is_left_in_the_temporary_directory(tmp_path: Path, temporary: Path, victim: str) -> None:
    assert TRAIN != LONG != LOADERS
    program = write_program(tmp_path, text=LOADERS)
    words = (*PACELINE, "run", program, "--workers", "2", "--run-dir", tmp_path / "run")
    with (
        closing(Announcements(tmp_path / "pipe")) as pipe,
        command(*words, "--tell", pipe.path, environment={"TMPDIR": str(temporary)}, cold=True) as running,
    ):
        pid = running.told(pipe, 2)[0]["pid"]
        assert list(temporary.glob("*/listener-*")) != [], "loaders pass on memory through sockets"
        os.kill(pid if victim == "worker" else psutil.Process(pid).children()[0].pid, signal.SIGKILL)
        code, output = running.end()
        assert running.left() == []
    assert code == (76 if victim == "worker" else 1), output
    assert [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")] == []
