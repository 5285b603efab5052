"""Follows a submitted job to its end, as its console on the hosts shows it."""

from __future__ import annotations

import sys
import time
from typing import Protocol

from paceline.errors import LaunchError
from paceline.launch.engines.engine import Console, EngineState, Say
from paceline.launch.engines.engine_record import EngineRecord

__all__ = ["Followed", "follow"]

READ_S = 0.1
UNHEARD_S = 300.0  # so long an engine may not answer: the job goes on meanwhile
ASK_S, SELDOM_S = 0.5, 10.0  # between two questions to the engine: at first, and later, to spare its controller
SOFTEN = 1.2


class Followed(Protocol):
    """The engine of a job that goes on by itself."""

    def state(self, record: EngineRecord) -> EngineState: ...

    def console(self, record: EngineRecord) -> Console: ...


def follow(engine: Followed, record: EngineRecord, *, say: Say) -> int:
    """Show the hosts' output until the job has ended; return its exit status. Ctrl-C ends the following, not the job.

    What the engine says of the job is shown when it changes, unless the hosts are at work. Raises KeyboardInterrupt,
    and LaunchError where the engine does not answer for five minutes.
    """
    console = engine.console(record)
    said, every_s, ask_at = "", ASK_S, 0.0
    heard = time.monotonic()
    try:
        while True:
            _show(console)
            now = time.monotonic()
            if now >= ask_at:
                record = EngineRecord.load(record.run_dir) or record  # a resize has changed it
                try:
                    state = engine.state(record)
                except LaunchError as error:
                    if now - heard > UNHEARD_S:
                        raise
                    if str(error) != said:
                        say(f"{error} It is asked again; the job goes on meanwhile")
                    said, ask_at = str(error), now + SELDOM_S
                    continue
                heard = now
                if state.phase == "ended":
                    _show(console)
                    say(state.says)
                    return state.exit_code if state.exit_code is not None else 1
                if state.says != said and (state.phase != "running" or not said):
                    say(state.says)
                    every_s = ASK_S
                said = state.says
                every_s = min(SELDOM_S, every_s * SOFTEN)
                ask_at = now + every_s
            time.sleep(READ_S)  # files and controllers tell nobody
    finally:
        console.close()


def _show(console: Console) -> None:
    while text := console.read():
        sys.stdout.write(text)
        sys.stdout.flush()
