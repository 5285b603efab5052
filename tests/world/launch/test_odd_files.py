"""Scripts with odd names, and beside files that have the name of a module of Python."""

from __future__ import annotations

import os
from pathlib import Path

from programs import PACELINE, command, write_program

SHADOWS = """
import paceline


def train(worker):
    pass


paceline.run(train, workers=2)
"""


def test_a_file_that_shadows_a_module_and_starts_a_run_is_named_and_starts_none(tmp_path: Path) -> None:
    """torch imports tarfile, and that grp."""
    program = write_program(tmp_path)
    (tmp_path / "grp.py").write_text(SHADOWS)
    words = (*PACELINE, "run", program, "--workers", "2", "--run-dir", tmp_path / "run")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with command(*words, cwd=tmp_path, environment={"PYTHONPATH": path}, cold=True) as running:
        code, output = running.end()
        assert running.left() == []
    assert code == 2, output
    assert "paceline.run() was called by an import" in output
    assert str(tmp_path / "grp.py") in output
    assert not (tmp_path / "runs").exists()


def test_a_script_whose_name_is_no_text_runs(tmp_path: Path) -> None:
    program = write_program(tmp_path).rename(tmp_path / os.fsdecode(b"\xff\xfe.py"))
    words = (*PACELINE, "run", program, "--workers", "2", "--run-dir", tmp_path / "run")
    with command(*words, cold=True) as running:
        code, output = running.end()
    assert code == 0, output
