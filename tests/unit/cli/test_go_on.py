"""The command that goes on with an interrupted run."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.environment import RUN_DIR
from paceline.runs.go_on import command_of_script, command_of_words, command_of_world
from paceline.units import printable, shell_text

RUN = Path("runs/a b")


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/paceline"])
    monkeypatch.setattr(sys, "orig_argv", ["python3", "train.py", "--lr", "0.1"])


def test_the_command_names_the_directory_that_it_had_made(tmp_path: Path) -> None:
    words = ["run", "train.py", "--workers", "4", "--fresh", "--", "--fresh"]
    command = command_of_words(words, RUN, script=None, names_dir=False)
    assert shlex.split(command) == ["paceline", "run", "--run-dir", str(RUN), *words[1:4], "--", "--fresh"]
    assert command_of_words(words[:2], RUN, script=None, names_dir=True) == "paceline run train.py"


def test_a_script_that_starts_over_is_told_not_to(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("paceline.run(train, fresh=True)")
    assert "--set fresh=false train.py" in command_of_words(["run", "train.py"], RUN, script=script, names_dir=True)
    assert command_of_script(RUN, script=script, names_dir=True).startswith(f"{RUN_DIR}='runs/a b' python3 train.py")
    script.write_text("paceline.run(train, run_dir='runs/a b')")
    assert command_of_script(RUN, script=script, names_dir=True) == "python3 train.py --lr 0.1"
    assert command_of_script(RUN, script=script, names_dir=False).startswith(f"{RUN_DIR}=")


def test_of_an_engine_that_is_not_seen_only_the_variable_is_said() -> None:
    assert command_of_world(RUN).endswith(f"{RUN_DIR}='runs/a b' in the environment of all workers")


def test_words_are_pasted_as_they_are() -> None:
    words = ["run", "a b", "it's \x1b[31m\n\\n\t", "\u202e\x85é", "raw\udcff9", ""]
    said = shell_text(*words)
    assert printable(said) == said and "\n" not in said
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {said}"], capture_output=True, check=True).stdout
    assert [os.fsdecode(word) for word in printed.split(b"\0")[:-1]] == words
