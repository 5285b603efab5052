"""`make accelerator`: a table whatever happens. A few of its checks run here, on the CPU and in small."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "benchmarks" / "accelerator.py"


def started(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(PROGRAM), *words], capture_output=True, text=True, timeout=200)


@pytest.mark.thorough
def test_a_few_checks_leave_a_table_in_both_forms(tmp_path: Path) -> None:
    done = started("--device", "cpu", "--only", "communicator,elastic", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "table.json").read_text())
    assert found["facts"]["device"] == "cpu"
    verdicts = [(row["check"].split(":")[0], row["verdict"]) for row in found["rows"]]
    assert verdicts == [("communicator", "holds"), ("elastic", "measured"), ("elastic", "holds")]
    assert found["rows"][2]["command"] == "make accelerator ARGS='--only elastic'"
    table = (tmp_path / "out" / "table.md").read_text()
    assert "| check | asked | measured | verdict | command |" in table and table in done.stdout
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"table.md", "table.json", "rows.jsonl", "log.txt"}


@pytest.mark.thorough
def test_a_check_that_is_not_known_and_a_device_that_is_not_there_are_refused(tmp_path: Path) -> None:
    unknown = started("--only", "speed", "--out", str(tmp_path))
    assert unknown.returncode == 2 and "there is no check 'speed'; there are communicator, parity" in unknown.stderr
    import torch

    if not torch.cuda.is_available():
        without = started("--device", "cuda", "--out", str(tmp_path))
        assert without.returncode == 2 and "torch finds no device here" in without.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("probe", "says"),
    [
        ("raise RuntimeError('no driver')", "torch cannot look for a device: RuntimeError: no driver"),
        ("import time; time.sleep(60)", "torch has looked for a device for 0.5 s, without an answer"),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_device_that_cannot_be_looked_for_is_not_taken_for_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    device: str,
    probe: str,
    says: str,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module: Any = importlib.import_module("accelerator")
    monkeypatch.setattr(module, "PROBE", probe)
    monkeypatch.setattr(module, "PROBE_S", 0.5 if "sleep" in probe else 60.0)
    monkeypatch.setattr(sys, "argv", ["accelerator.py", "--device", device, "--out", str(tmp_path / "out")])
    assert module.main() == 2
    assert capsys.readouterr().err.endswith(f"\n--device {device}: {says}. --device cpu tries the checks themselves\n")
    assert not (tmp_path / "out").exists()
    assert module._facts("cpu")["device"] == "cpu"


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The module that keeps the limits, with checks of the test's own in place of the program's."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    module = importlib.import_module("device_checks.clock_budget")
    checks = tmp_path / "checks"
    (checks / "device_checks").mkdir(parents=True)
    (checks / "device_checks" / "__init__.py").touch()
    (checks / "device_checks" / "one.py").write_text(
        "import json, subprocess, sys, time\n"
        "name, _, _, rows, command = sys.argv[1:]\n"
        "row = {'check': name, 'asked': 'a', 'measured': 'm', 'verdict': 'holds', 'command': command, 'seconds': 0}\n"
        "open(rows, 'a').write(json.dumps(row) + '\\n')\n"
        "if name == 'hangs':\n"
        "    child = subprocess.Popen(['sleep', '100'], start_new_session=True)\n"
        "    print(child.pid, flush=True)\n"
        "    time.sleep(100)\n"
        "if name == 'breaks':\n"
        "    open(rows, 'a').write('{\"check\": ')\n"
        "    sys.exit('the device fell off')\n"
    )
    monkeypatch.setattr(module, "ROOT", checks.parent)
    monkeypatch.setenv("PYTHONPATH", str(checks))
    yield module


def run_all(budget: ModuleType, folder: Path, *names: str, limit_s: float = 60.0, left_s: float = 60.0) -> list[Any]:
    folder.mkdir()
    limits = dict.fromkeys(names, limit_s)
    deadline = time.monotonic() + left_s
    return budget.run_checks(
        names, limits_s=limits, device="cpu", folder=folder, deadline=deadline, after_each=lambda _: None
    )


def test_a_check_that_overruns_keeps_its_rows_and_leaves_no_process(budget: ModuleType, tmp_path: Path) -> None:
    rows = run_all(budget, tmp_path / "out", "hangs", "ends", limit_s=1.5)
    assert [(row.check, row.verdict) for row in rows] == [("hangs", "holds"), ("hangs", "failed"), ("ends", "holds")]
    assert rows[1].measured.startswith("stopped after 2 s, its limit")
    child = int((tmp_path / "out" / "log.txt").read_text().splitlines()[2])
    assert not psutil.pid_exists(child), "what the check started, in a session of its own, has ended with it"


def test_a_check_that_fails_says_why_and_the_next_one_runs(budget: ModuleType, tmp_path: Path) -> None:
    rows = run_all(budget, tmp_path / "out", "breaks", "ends")
    assert [(row.check, row.verdict) for row in rows] == [("breaks", "holds"), ("breaks", "failed"), ("ends", "holds")]
    assert rows[1].measured == "exit status 1: the device fell off"


def test_what_the_time_does_not_suffice_for_is_told_as_not_run(budget: ModuleType, tmp_path: Path) -> None:
    rows = run_all(budget, tmp_path / "out", "ends", "later", left_s=budget.LEAST_S + budget.END_S - 0.5)
    assert [(row.check, row.verdict, row.measured) for row in rows] == [
        ("ends", "not run", "out of time"),
        ("later", "not run", "out of time"),
    ]
