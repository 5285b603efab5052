"""The process beside the supervisor that holds an experiment tracker's client: `python -m ...tracker_process NAME`.

It reads one call a line from standard input, as JSON, and answers each with one line. The tracker's own output goes to
standard error, which is `RUN/loggers/NAME.log`. It has low priority, and ends when its input does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Any, BinaryIO, cast

from paceline.monitor.export.run_logger import LoggedRun, RunLogger, ScalarPoint

__all__ = ["TRACKERS", "main", "point_from", "point_to"]

NICENESS = 10
ENDS_S = 30.0  # after the supervisor has gone
# Tracker: the package that it needs, its module here, its class.
TRACKERS = {
    "wandb": ("wandb", "paceline.monitor.export.wandb_logger", "WandbLogger"),
    "mlflow": ("mlflow", "paceline.monitor.export.mlflow_logger", "MlflowLogger"),
}


def main(name: str) -> int:
    """Serve the calls of one run; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor says when the run ends
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the package prints is no answer
    _, module, cls = TRACKERS[name]
    logger = cast("RunLogger", getattr(importlib.import_module(module), cls)())
    state = _serve(logger, sys.stdin.buffer, answers)
    if state is None:  # the supervisor was killed, or gave up
        _exit_after(ENDS_S)
        logger.end("failed")
    return 0


def _serve(logger: RunLogger, calls: BinaryIO, answers: BinaryIO) -> str | None:
    """Carry out calls until the run's end, and return its state; None where the input ends before."""
    for line in calls:
        call: dict[str, Any] = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            match call["call"]:
                case "start":
                    answer["last_step"] = logger.start(_run_from(call["run"]))
                case "log":
                    logger.log([point_from(each) for each in call["points"]])
                case _:
                    logger.end(str(call["state"]))
        except Exception as error:  # the package's, of any kind: reported, and the run goes on without it
            text = str(error).strip()
            answer["error"] = f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
        try:
            answers.write(json.dumps(answer).encode() + b"\n")
            answers.flush()
        except OSError:  # nobody reads it any more
            return None
        if call["call"] == "end" or "error" in answer:
            return str(call.get("state", "failed"))
    return None


def _exit_after(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, [1])
    timer.daemon = True
    timer.start()


def _run_from(said: Mapping[str, Any]) -> LoggedRun:
    fields: dict[str, Any] = {**said, "hosts": tuple(said["hosts"]), "devices": tuple(said["devices"])}
    return LoggedRun(**fields)


def point_to(point: ScalarPoint) -> list[Any]:
    """A point as plain data; JSON here has NaN and infinity, since both ends are Python's."""
    return [point.step, point.time, dict(point.values)]


def point_from(said: list[Any]) -> ScalarPoint:
    """The point of such data."""
    return ScalarPoint(step=said[0], time=said[1], values=said[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
