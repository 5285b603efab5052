"""The process of a parameter server: one that does not begin is not waited for without end."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from paceline.sync.parameter_server import server_process
from paceline.sync.parameter_server.server import Server, ServerParameters


def test_a_server_that_does_not_begin_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "BEGIN_S", 0.1)

    def make() -> ServerParameters:
        (tmp_path / "pid").write_text(str(os.getpid()))
        signal.pause()
        raise AssertionError("nobody wakes it")

    with pytest.raises(RuntimeError, match=r"did not begin within 0 s, and was killed"):
        server_process.fork_server(make, address="127.0.0.1", secret=b"s", server=Server)
    pid = (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""
    assert not pid or not Path("/proc", pid).exists()  # it may have been killed before it had written anything
