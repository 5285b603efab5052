"""Stop and resize a run from its page, and take one out of its pool: what `paceline stop`, `paceline resize` and
`paceline pool --cancel` do, by these commands themselves."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

from paceline.units import printable

__all__ = ["RunControl"]

ANSWER_S = 8.0  # a command that has not ended by then goes on, and the page shows what becomes of the run
LIMIT_S = 600.0  # then it is ended: the run itself goes on, or ends, as it was asked to
MOST_TEXT = 1000


class RunControl:
    """Runs one command for a run at a time; `close` ends those that still wait for their runs."""

    def __init__(self) -> None:
        self._under_way: dict[Path, asyncio.Task[tuple[int, str]]] = {}

    async def ask(self, run_dir: Path, *words: str) -> dict[str, Any]:
        """Have a command done: `stop`, or `resize` and a number, of a run; or `pool` and what it is to do, of a pool.
        Returns `says` or `error`."""
        running = self._under_way.get(run_dir)
        if running is not None and not running.done():
            return {"error": "another command for this run is under way"}
        task = asyncio.create_task(_command(run_dir, words))
        self._under_way[run_dir] = task
        done, _ = await asyncio.wait({task}, timeout=ANSWER_S)
        if not done:
            return {"says": "asked to save and end"}
        del self._under_way[run_dir]
        code, text = task.result()
        return {"says": text} if code == 0 else {"error": text or f"it ended with status {code}"}

    async def close(self) -> None:
        """End the commands; the runs do what they were asked to."""
        tasks = [task for task in self._under_way.values() if not task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _command(run_dir: Path, words: tuple[str, ...]) -> tuple[int, str]:
    """Exit status and last lines of a command."""
    verb, *rest = words
    try:
        process = await _started(verb, str(run_dir), *rest)
    except OSError as error:  # no memory, or no processes left
        return 1, printable(str(error))
    try:
        async with asyncio.timeout(LIMIT_S):
            said, _ = await process.communicate()
    except TimeoutError:
        return 1, f"no answer within {LIMIT_S:.0f} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    text = said.decode("utf-8", errors="replace").strip().removeprefix("paceline: ")
    return process.returncode or 0, printable(text[-MOST_TEXT:])


async def _started(*words: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "paceline",
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
