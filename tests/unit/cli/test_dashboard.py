"""`paceline dashboard` writes both files, and replaces none without being asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli.main import main


def test_both_files_are_written_and_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "b"
    assert main(["dashboard", str(folder)]) == 0
    alerts, dashboard = sorted(folder.iterdir())
    assert json.loads(dashboard.read_text())["title"] == "Paceline runs"
    alerts.write_text("mine")
    assert main(["dashboard", str(folder)]) == 2
    assert "would be replaced: name another folder, or add --force" in capsys.readouterr().err
    assert alerts.read_text() == "mine"
    assert main(["dashboard", str(folder), "--force"]) == 0
    assert alerts.read_text().startswith("# Alerts on a run's Prometheus endpoint")
