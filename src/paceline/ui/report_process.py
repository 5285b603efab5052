"""The account of a run's time, its incidents and its receipt, as `paceline report --json` tells them.

It takes reading all events of a run, which may be seconds of work. So it is done by that command in a process of its
own, at the lowest priority, one at a time: neither the pages nor the training wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from paceline.units import printable

__all__ = ["ReportProcess"]

# The command line imports all commands first, which takes as long as the report itself.
PROGRAM = (
    "import sys; from paceline.monitor.report.command import main_report as do; sys.exit(do(sys.argv[1], json=True))"
)
LIMIT_S = 300.0
KILLED_S = 5.0  # a process is gone by then
MOST_BYTES = 64 << 20  # of what it prints
LOWEST_PRIORITY = 19
MOST_INCIDENTS = 300  # the newest ones
MOST_WORKERS = 128
MOST_ATTEMPTS = 50
KEPT = (
    "began",
    "duration_s",
    "goodput",
    "useful",
    "wall_s",
    "first_loss",
    "last_loss",
    "timeline",
    "members",
    "receipt",
    "prediction",
    "receipt_rows",
    "receipt_missing",
    "memory",
    "snapshots",
    "measures",
    "elsewhere",
)


class ReportProcess:
    """Runs one command at a time; `close` ends the one that runs."""

    def __init__(self) -> None:
        self._one = asyncio.Semaphore(1)
        self._process: asyncio.subprocess.Process | None = None

    async def read(self, run_dir: Path) -> dict[str, Any]:
        """Return what a page shows of a run's report, or `{"problem": text}`; takes at most `LIMIT_S`, after its
        turn has come."""
        async with self._one:
            try:
                async with asyncio.timeout(LIMIT_S):
                    return await self._read(run_dir)
            except TimeoutError:
                return {"problem": f"the report takes longer than {LIMIT_S:.0f} s: see paceline report"}
            except (OSError, ValueError) as error:
                return {"problem": printable(str(error))}
            except (KeyError, TypeError) as error:  # what another version says, which may be started in its place
                return {"problem": printable(f"the report lacks what a page shows: {error!r}")}
            finally:
                await self.close()

    async def close(self) -> None:
        """End the process, if one runs, and wait until it has ended."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            async with asyncio.timeout(KILLED_S):
                await process.wait()

    async def _read(self, run_dir: Path) -> dict[str, Any]:
        words = [sys.executable, "-c", PROGRAM, str(run_dir)]
        self._process = process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        with contextlib.suppress(OSError):  # it has ended already
            os.setpriority(os.PRIO_PROCESS, process.pid, LOWEST_PRIORITY)
        said, complaint = await process.communicate()
        if process.returncode != 0:
            text = complaint.decode("utf-8", errors="replace").strip().removeprefix("paceline: ")
            return {"problem": printable(text[-500:]) or f"the report ended with status {process.returncode}"}
        if len(said) > MOST_BYTES:
            return {"problem": "the report is too long for a page: see paceline report"}
        return await asyncio.to_thread(_shown, said)


def _shown(said: bytes) -> dict[str, Any]:
    """What a page shows of the report; bounded."""
    facts: dict[str, Any] = json.loads(said)
    workers = dict([*facts["workers"].items()][:MOST_WORKERS])
    attempts = [{name: one[name] for name in one if name != "workers"} for one in facts["attempts"]]
    return {name: facts[name] for name in KEPT if name in facts} | {
        "workers": workers,
        "num_workers": len(facts["workers"]),
        "attempts": attempts[-MOST_ATTEMPTS:],
        "incidents": facts["incidents"][-MOST_INCIDENTS:],
        "num_incidents": len(facts["incidents"]),
        "presence": facts["presence"][:MOST_WORKERS],
    }
