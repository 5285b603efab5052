"""A disk that is full, or takes no writes: what is said is one sentence, and what is kept can be trusted."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import RunFileError
from paceline.monitor.records import run_files
from paceline.monitor.records.run_record import RunRecord
from paceline.plan.job import ERROR_SPARE
from paceline.worker.record.error_report import reserve_error_space
from programs import PACELINE, checkpoints, record, run

FILLS = """\
import torch, torch.nn.functional as F
import paceline


def train(worker):
    model = worker.prepare(torch.nn.Linear(4, 1))
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    step = worker.stepper(model, optim, F.mse_loss)
    data = torch.utils.data.TensorDataset(torch.randn(96, 4), torch.randn(96, 1))
    for batch in worker.batches(data, epochs=100, name="data"):
        step(batch)
        if worker.step == 25 and worker.is_first:
            worker.save()  # waits for the last one
            with open("disk/filler", "wb", buffering=0) as filler:
                try:
                    while filler.write(bytes(4096)):
                        pass
                except OSError:
                    pass


paceline.run(train, plan="batch(size=12,micro=2)")
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, with little room."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a file system: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_full_disk_ends_the_run_with_one_sentence_and_keeps_the_last_checkpoint(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "fills.py").write_text(FILLS)
    words = [*PACELINE, "run", "fills.py", "--workers", "2", "--threads", "1", "--run-dir", "disk/run"]
    code, output = run(*words, "--save-every", "10")
    assert code == 1, output
    report = next(part for part in output.split("\n\n") if part.startswith("worker"))
    assert re.match(r"workers? .* failed (with the same error )?after step \d+: RunFileError: ", report)
    assert (
        "could not be written: No space left on device. Free space there and start again with the same run_dir"
        in report
    )
    assert "Traceback" not in output
    lost, go_on = output.splitlines()[-2:]
    assert (
        lost.startswith("not whole, because of the disk: ")
        and "go on with: " in go_on
        and " --run-dir disk/run" in go_on
    )
    assert (record(disk / "run")["state"], record(disk / "run")["exit_code"]) == ("failed", 1)
    told = json.loads(run(*PACELINE, "status", "disk/run", "--json")[1])
    assert told["state"] == "failed"
    assert 20 in checkpoints(disk / "run")
    (disk / "filler").unlink()
    (tmp_path / "fills.py").write_text(FILLS.replace("worker.step == 25", "False"))
    code, output = run(*words, "--max-steps", "40")
    assert code == 0, output
    assert record(disk / "run")["state"] == "finished"


def test_a_step_log_that_cannot_be_closed_is_reported_and_the_training_counts(tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text(FILLS.replace("worker.step == 25", "False").replace("epochs=100", "epochs=1"))
    (tmp_path / "run" / "metrics.jsonl").mkdir(parents=True)
    (tmp_path / "run" / "summary.json").mkdir()
    code, output = run(*PACELINE, "run", "short.py", "--run-dir", "run")
    assert code == 1, output
    assert output.count("run/metrics.jsonl could not be written: Is a directory.") == 1
    assert "Traceback" not in output
    assert "finished at step 8" in output
    assert output.splitlines()[-1] == "not whole, because of the disk: run/metrics.jsonl, run/summary.json"
    assert (record(tmp_path / "run")["state"], record(tmp_path / "run")["exit_code"]) == ("finished", 1)
    assert checkpoints(tmp_path / "run") == [8]


def test_a_record_is_written_over_where_there_is_no_room_for_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = RunRecord.begin_attempt(tmp_path, job={}, workers=1)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_files.os, "fsync", full)
    begun.end_attempt("failed", 1)
    assert RunRecord.load(tmp_path).state == "failed"
    with pytest.raises(OSError, match="No space left"):  # not into blocks that the file does not have
        run_files.replace_text(tmp_path / "run.json", "x" * 100_000)
    assert RunRecord.load(tmp_path).state == "failed"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "run.json"]


@pytest.mark.parametrize("character", ["x", "\u9000"], ids=["ascii", "six bytes"])
def test_an_error_is_written_over_the_spare_file_where_there_is_no_room(tmp_path: Path, character: str) -> None:
    reserve_error_space(tmp_path)
    code = (
        "import resource, time\n"
        "from paceline.plan import Job\n"
        "from paceline.plan.job import Assignment\n"
        "from paceline.worker.record.error_report import write_error\n"
        f"own = Assignment(rank=0, workers=1, local_rank=0, local_workers=1, host='h', host_index=0, hosts=1,"
        f" address='', run_dir='', attempt=1, worker_dir={str(tmp_path)!r}, channel_fd=-1, command_started=0.0,"
        " job=Job())\n"
        "def deep(n):\n"
        "    if n:\n"
        "        return deep(n - 1)\n"
        f"    raise ValueError('begin' + {character!r} * 9000 + 'end')\n"
        "try:\n"
        "    deep(20)\n"
        "except ValueError as error:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "    write_error(error, own, step=3)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    told = json.loads((tmp_path / "error.json").read_text())
    assert (told["kind"], told["step"]) == ("ValueError", 3)
    for text in (told["message"], told["traceback"].rstrip()):
        assert "begin" in text or text.startswith("Traceback")
        assert "characters left out" in text
        assert text.endswith("end")
    assert not (tmp_path / ERROR_SPARE).exists()


def test_the_sentence_names_file_reason_and_remedy() -> None:
    full = RunFileError.about(Path("run/x.jsonl"), OSError(errno.ENOSPC, "No space left on device"))
    assert str(full).startswith("run/x.jsonl could not be written: No space left on device. Free space there")
    denied = RunFileError.about(Path("run/x.jsonl"), PermissionError(errno.EACCES, "Permission denied"))
    assert str(denied) == (
        "run/x.jsonl could not be written: Permission denied. Look at the disk and the rights there, "
        "or use another run_dir."
    )
