"""`paceline doctor` as a user starts it: a run that measures, its words, and a file that `paceline plan` reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.main import main
from paceline.planner.cluster import load_catalogue


def doctor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "paceline", "doctor", *words], cwd=folder, capture_output=True, text=True, timeout=120
    )


@pytest.mark.further  # the page on examining a cluster runs the command, too
def test_this_machine_is_examined_and_written_as_a_cluster(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--workers", "2", "--seconds", "0.01", "--name", "lab", "--out", "lab.toml")
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("examined 2 workers on", "of fp32 matrix products", "for an all-reduce of 64.0 MiB", "MB/s written"):
        assert word in done.stdout
    assert "cluster  lab.toml: paceline plan SCRIPT --cluster lab.toml" in done.stdout
    cluster = load_catalogue(tmp_path / "lab.toml").clusters["lab"]
    assert (cluster.hosts, cluster.devices_per_host) == (1, 2)
    assert cluster.device.is_synchronous
    (run_dir,) = (tmp_path / "runs").glob("doctor-*")
    assert not list(run_dir.rglob("doctor.disk"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--seconds", "0"), "--seconds is 0; give 0.01 to 600 seconds"),
        (("--name", "a b"), "--name is 'a b'"),
        (("--out", "cluster.json"), "ends in .toml"),
        (("--out", "no/such/cluster.toml"), "in a folder that is there"),
    ],
)
def test_words_that_cannot_work_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    assert main(["doctor", *words]) == 2
    assert says in capsys.readouterr().err
