"""Which end of a program is its own, and which only came of another task's end."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from paceline.compat.tensorflow.task_end import (
    TaskIdentity,
    error_fields,
    is_aborted_by_peer,
    is_peer_loss,
    loss_fields,
)
from paceline.launch.job.outcome import WorkerExit, is_root_loss, verdict

TENSORFLOW = "tensorflow.python.framework.errors_impl"
WHO = TaskIdentity(rank=2, host="east", log="stderr.log")


@pytest.mark.parametrize(
    ("kind", "module", "message", "is_loss"),
    [
        ("UnavailableError", TENSORFLOW, "Collective ops is aborted by: Connection reset by peer", True),
        ("UnavailableError", TENSORFLOW, "failed to connect to all addresses; last error: UNKNOWN", True),
        ("InternalError", TENSORFLOW, "The following tasks are unhealthy (stopped sending heartbeats)", True),
        ("InvalidArgumentError", TENSORFLOW, "Incompatible shapes: [2] vs. [3]; Connection reset", False),
        ("UnavailableError", "my_program", "Connection reset by peer", False),  # not TensorFlow's
        ("ResourceExhaustedError", TENSORFLOW, "OOM when allocating tensor", False),
        ("InternalError", TENSORFLOW, "Blas GEMM launch failed", False),
    ],
)
def test_only_tensorflows_own_errors_of_lost_connections_are_consequences(
    kind: str, module: str, message: str, is_loss: bool
) -> None:
    assert is_peer_loss({"kind": kind, "module": module, "message": message}) is is_loss


def ended(fields: dict[str, Any], *, signum: int | None = None) -> WorkerExit:
    return WorkerExit(
        worker=2, host="east", pid=7, exit_code=None if signum else 1, signal=signum, peak_memory_bytes=0,
        error=fields, sent_by_us=False, name="worker 1",
    )  # fmt: skip


def test_an_error_of_the_program_is_no_loss_and_keeps_its_traceback() -> None:
    report = {"kind": "ValueError", "module": "builtins", "message": "no", "traceback": "Traceback ...\nValueError: no"}
    fields = error_fields(report, code=1, common=WHO.fields(7))
    assert (fields["kind"], fields["message"], fields["echo"]) == ("ValueError", "no", False)
    assert fields["traceback"] == report["traceback"]
    assert not ended(fields).is_loss


def test_a_program_that_only_exits_is_told_by_its_code() -> None:
    fields = error_fields(None, code=3, common=WHO.fields(7))
    assert fields["message"] == "the program ended with exit code 3, and without an error of Python's"


def test_a_killed_program_is_a_loss_after_which_all_may_start_again() -> None:
    fields = loss_fields("worker 1", signum=9, pid=7, is_echo=False, common=WHO.fields(7))
    lost = ended(fields, signum=9)
    assert is_root_loss(lost)
    outcome = verdict([lost], keeps_state=True)
    assert outcome.recoverable_loss is not None
    assert outcome.recoverable_loss.causes == ("worker 1 (pid 7) killed by signal 9",)
    assert fields["message"] == "worker 1 (host east, pid 7) was killed by signal 9 (SIGKILL)"


@pytest.mark.parametrize(
    ("signum", "log", "is_echo"),
    [
        (signal.SIGABRT, "Terminating: the coordination service has reported an error", True),
        (signal.SIGABRT, "free(): invalid pointer", False),
        (signal.SIGSEGV, "coordination service", False),
    ],
)
def test_an_abort_is_a_consequence_only_where_tensorflow_says_so(
    tmp_path: Path, signum: int, log: str, is_echo: bool
) -> None:
    (tmp_path / "stderr.log").write_text("x" * 20_000 + "\n" + log)
    assert is_aborted_by_peer(signum, tmp_path / "stderr.log") is is_echo
    assert not is_aborted_by_peer(signum, tmp_path / "none.log")


def test_long_tracebacks_lose_their_middle() -> None:
    report = {"kind": "E", "message": "m" * 9000, "traceback": "line\n" * 500}
    fields = error_fields(report, code=1, common=WHO.fields(7))
    assert len(fields["message"]) < 4100 and "characters left out" in fields["message"]
    assert "(440 lines left out)" in fields["traceback"]
