"""A run whose driver is the command that has started it: later commands find it by its process on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from paceline.launch.engines.engine import EngineState
from paceline.launch.engines.engine_record import EngineRecord
from paceline.launch.engines.host_driver import HostDriver
from paceline.launch.engines.run_state import ended
from paceline.processes import is_same_process, process_started_s

__all__ = ["LOG", "driver_handle", "driver_state", "end_driver", "signals_to"]

LOG = "console.log"  # of the run's engine directory: a copy of what the hosts print
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def driver_handle() -> dict[str, Any]:
    """What the record says of this process."""
    return {"pid": os.getpid(), "pid_started_s": process_started_s(os.getpid()) or 0.0, "names": {}}


def driver_state(record: EngineRecord, name: str) -> EngineState:
    """Look for the driver; `name` is what people call the run."""
    if _is_there(record):
        return EngineState(phase="running", says=f"process {record.handle['pid']} runs {name}")
    code = record.handle.get("exit_code")
    return ended(record, name, otherwise=lambda: (code, "over"))


def end_driver(record: EngineRecord) -> None:
    """Have the driver, and so the run, save and end."""
    with contextlib.suppress(ProcessLookupError):
        if _is_there(record):
            os.kill(int(record.handle["pid"]), signal.SIGTERM)


@contextlib.contextmanager
def signals_to(driver: HostDriver) -> Iterator[None]:
    """Pass signals to this process on to the run; in a thread, which gets none, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda signum, _: driver.note_signal(signum)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_there(record: EngineRecord) -> bool:
    return is_same_process(int(record.handle["pid"]), float(record.handle["pid_started_s"]))
