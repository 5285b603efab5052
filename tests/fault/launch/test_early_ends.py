"""Workers whose process ends by itself before their function has returned, with an exit status that sounds good."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import quick
from programs import PACELINE, TRAIN, run, write_program

ELASTIC = ("--plan", "replicas=1-2+batch(size=12,micro=3)")


def quitting(folder: Path, *, who: str, code: int) -> Path:
    """The program, in which the workers for which `who` holds end by os._exit in step 5."""
    step = f"        if worker.step == 4 and {who}:\n            os._exit({code})\n"
    marker = "        worker.report(loss=step(batch))\n"
    return write_program(folder, text=TRAIN.replace(marker, f"{step}{marker}"))


@pytest.mark.parametrize(
    ("code", "options"),
    [
        pytest.param(0, (), id="0-fixed"),
        pytest.param(75, (), id="75-fixed"),
        pytest.param(76, ELASTIC, id="76-elastic"),
        quick.further(76, (), id="76-fixed"),
        quick.further(0, ELASTIC, id="0-elastic"),
        quick.further(75, ELASTIC, id="75-elastic"),
    ],
)
def test_a_worker_that_quits_with_a_good_status_is_the_failure(
    tmp_path: Path, code: int, options: tuple[str, ...]
) -> None:
    program = quitting(tmp_path, who="worker.rank == 1", code=code)
    status, output = run(*PACELINE, "run", program, "--run-dir", "run", *options, cwd=tmp_path)
    assert status == 1, output
    says = rf"worker 1 \(host \S+, pid \d+\) ended with exit code {code} after step 4, before its function had returned"
    assert re.search(rf"^{says}: os._exit\(\) or a C library ended it; see its stderr.log$", output, re.MULTILINE)
    assert "worker 0 stopped because of it" in output and "finished" not in output


def test_where_all_quit_nothing_is_finished(tmp_path: Path) -> None:
    program = quitting(tmp_path, who="True", code=0)
    status, output = run(*PACELINE, "run", program, "--run-dir", "run", cwd=tmp_path)
    assert status == 1, output
    assert "workers 0, 1 (host" in output and "all ended with exit code 0 after step 4, before" in output
    assert "finished at step" not in output


def test_a_script_that_ends_by_itself_behind_its_run_has_finished(tmp_path: Path) -> None:
    marker = '    print("value "'
    program = write_program(tmp_path, text=TRAIN.replace(marker, f"    os._exit(0)\n{marker}"))
    status, output = run(*PACELINE, "run", program, "--run-dir", "run", cwd=tmp_path)
    assert status == 0, output
    assert "finished at step 8" in output
