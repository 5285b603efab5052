"""`paceline checkpoints`: what is on the disk and what is in the store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import refused, run
from paceline.checkpoint.checkpoint_dir import COMMIT_MARKER
from paceline.checkpoint.remote.remote_checkpoints import RemoteCheckpoints
from paceline.checkpoint.remote.uploader import Uploader
from remote_runs import BreakingStore, put_checkpoint


def test_checkpoints_of_both_places_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"file://{tmp_path}/far/run"
    for step in (10, 20):
        put_checkpoint(tmp_path / "run", step)
    uploader = Uploader(tmp_path / "run", RemoteCheckpoints(BreakingStore(address)), keep=3)
    uploader.turn()
    (tmp_path / "run" / "checkpoints" / "step_00000010" / COMMIT_MARKER).unlink()
    status, out, _ = run(capsys, "checkpoints", str(tmp_path / "run"))
    assert status == 0 and "NOT COMPLETE: it has no checkpoint.json" in out and len(out.splitlines()) == 2
    status, out, _ = run(capsys, "checkpoints", address, "--json")
    (row,) = json.loads(out)
    assert status == 0 and row["step"] == 20 and row["place"] == f"{address}/step_00000020" and row["problem"] is None


def test_where_nothing_is_complete_the_status_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    assert run(capsys, "checkpoints", str(tmp_path / "run"))[:2] == (1, "there are no checkpoints\n")
    assert "There is no directory" in refused(capsys, "checkpoints", str(tmp_path / "none"))
    assert "a place of its own" in refused(capsys, "checkpoints", "s3://bucket")
