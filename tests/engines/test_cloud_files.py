"""The files for SkyPilot and dstack in the documentation are ones that SkyPilot and dstack take."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from markdown_pages import blocks

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "run-on-spot-machines-in-a-cloud.md"
INSTALL_S, CHECK_S = 900.0, 120.0
# While a test runs, its home is a folder of its own.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline-cloud"
VERSIONS = {"skypilot": "0.14.1", "dstack": "0.22.5"}
CHECK = {
    "skypilot": """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
print(task.num_nodes, sorted(task.envs), task.run.split()[:3])
""",
    "dstack": """
import sys, yaml
from dstack._internal.core.models.configurations import parse_apply_configuration
task = parse_apply_configuration(yaml.safe_load(open(sys.argv[1])))
print(task.nodes, list(task.env), task.commands[1].split()[:3])
""",
}


def interpreter(package: str) -> Path:
    """One that has the package, in the user's cache: neither goes together with what the tests need."""
    place = CACHE / f"{package}-{VERSIONS[package]}-{sys.version_info[0]}.{sys.version_info[1]}"
    python = place / "bin" / "python"
    if not (place / "is-whole").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True, timeout=INSTALL_S)
        pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check", f"{package}=={VERSIONS[package]}"]
        subprocess.run(pip, check=True, timeout=INSTALL_S)
        (place / "is-whole").touch()
    return python


def check(package: str, text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Have a package read a file."""
    path = folder / "task.yaml"
    path.write_text(text)
    words = [str(interpreter(package)), "-c", CHECK[package], str(path)]
    return subprocess.run(
        words, capture_output=True, text=True, timeout=CHECK_S, env=os.environ | {"HOME": str(folder)}, cwd=folder
    )


@pytest.mark.timeout(2 * INSTALL_S)
@pytest.mark.parametrize(
    ("package", "known_by", "expected"),
    [
        ("skypilot", "num_nodes", "4 ['NFS'] ['paceline', 'run', 'train.py']"),
        ("dstack", "type: task", "4 ['PACELINE_TOKEN'] ['paceline', 'run', 'train.py']"),
    ],
)
def test_the_file_is_taken(package: str, known_by: str, expected: str, tmp_path: Path) -> None:
    (text,) = [block.text for block in blocks(PAGE) if block.language == "yaml" and known_by in block.text]
    done = check(package, text, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == expected
    spoiled = check(package, text.replace("spot", "spoot"), tmp_path)
    assert spoiled.returncode != 0, "a name that is not known is refused, so this is a check"
