"""Says why a run failed: the error that began it, first and once; everything that followed from it in one line."""

from __future__ import annotations

import dataclasses
import os
import re
import signal as signals
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.monitor.once import workers_text
from paceline.units import bytes_text

__all__ = ["Failure", "explain", "headline", "root"]

PACKAGE = f"{Path(__file__).resolve().parent.parent}{os.sep}"  # where our own frames lie
OURS = re.compile(r"[\\/](site|dist)-packages[\\/]paceline[\\/]")  # the same on a host with another layout
STARTERS = ("<frozen runpy>", "<frozen importlib", "<string>")  # what runs a script, above its own frames
CHAIN = re.compile(  # between the tracebacks of an error and of what it came from
    r"(\n\n(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n\n)"
)
FRAME = re.compile(r'^  File "([^"]+)", line \d+')
MESSAGE_WIDTH = 200  # of an error's message in a headline; the traceback below has all of it


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How one worker ended that did not end well."""

    worker: int
    host: str
    pid: int
    exit_code: int | None = None  # one of these two is set
    signal: int | None = None
    error: Mapping[str, Any] | None = None  # its error.json
    step: int = 0  # last step it had committed; error.json knows better
    time: float | None = None  # when its end was seen, time.time()
    peak_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    oom_likely: bool = False
    sent_by_us: bool = False  # the signal: the supervisor ended this worker because of another one


def root(failures: Sequence[Failure]) -> Failure:
    """Return the failure the others follow from: errors before echoes, before those we ended; then the earliest."""
    if not failures:
        raise ValueError("there is no failure to choose from: pass at least one")
    return min(failures, key=lambda failure: (_order(failure), _when(failure), failure.worker))


def explain(failures: Sequence[Failure]) -> str:
    """Return what the user reads when a run has failed; the text ends without a newline."""
    if not failures:
        return ""
    first = root(failures)
    equal = [failure for failure in failures if failure is first or _is_same(failure, first)]
    others = [failure for failure in failures if all(failure is not each for each in equal)]
    also = sorted((failure for failure in others if _order(failure) == 0), key=_when)
    followed = [failure.worker for failure in others if _order(failure) != 0]
    parts = [headline(first, equal)]
    if first.error and first.error.get("traceback"):
        parts.append(own_frames(str(first.error["traceback"]), usage=bool(first.error.get("usage"))))
    if first.oom_likely:
        parts.append("If so, use a smaller Batch(micro=...): a step then needs less memory and gives the same result.")
    parts += [f"{headline(failure)} (independently)" for failure in also]
    if followed:
        parts.append(f"{workers_text(followed)} stopped because of it")
    return "\n".join(parts)


def headline(failure: Failure, equal: Sequence[Failure] = ()) -> str:
    """Return one line that says who failed, where, when and of what; `equal` are the failures of the same kind."""
    what = _what(failure)
    if len(equal) > 1:
        hosts = ", ".join(dict.fromkeys(each.host for each in equal))
        who = f"{workers_text(each.worker for each in equal)} ({'hosts' if ',' in hosts else 'host'} {hosts})"
        if failure.error is None:
            plural = what.replace("was killed", "were all killed", 1).replace("ended with", "all ended with", 1)
            return f"{who} {plural}"
        return f"{who} all failed with the same error at step {_step(failure)}: {what}"
    who = f"worker {failure.worker} (host {failure.host}, pid {failure.pid})"
    return f"{who} failed at step {_step(failure)}: {what}" if failure.error else f"{who} {what}"


def own_frames(traceback: str, *, usage: bool = False) -> str:
    """Return a traceback without the frames of Paceline that lie above the user's first one.

    With `usage` (the user asked for something that cannot be) the frames below the user's last one are dropped too: the
    message says all of it. A traceback without a frame of the user's stays as it is.
    """
    return "".join(
        part if CHAIN.match(part) else _own_frames(part, usage) for part in CHAIN.split(traceback.rstrip("\n"))
    )


def _own_frames(traceback: str, usage: bool) -> str:
    lines = traceback.split("\n")
    starts = [number for number, line in enumerate(lines) if FRAME.match(line)]
    theirs = [start for start in starts if not _is_ours(lines[start])]
    if not theirs:
        return traceback
    end = next((n for n in range(starts[-1] + 1, len(lines)) if not lines[n].startswith(" ")), len(lines))
    ours_below = [start for start in starts if start > theirs[-1]]
    kept_end = min(ours_below, default=end) if usage else end
    return "\n".join(lines[: starts[0]] + lines[theirs[0] : kept_end] + lines[end:])


def _what(failure: Failure) -> str:
    if failure.error is not None:
        message = " ".join(str(failure.error.get("message", "")).split())
        short = message if len(message) <= MESSAGE_WIDTH else message[: MESSAGE_WIDTH - 3] + "..."
        kind = str(failure.error.get("kind", "error"))
        return f"{kind}: {short}" if short else kind
    if failure.signal is None:
        text = f"ended with exit code {failure.exit_code} at step {_step(failure)}"
        return f"{text}, without an error of its own; see its stderr.log"
    text = f"was killed by signal {failure.signal} ({_signal_name(failure.signal)}) at step {_step(failure)}"
    if failure.peak_memory_bytes:
        text += f"; peak memory {bytes_text(failure.peak_memory_bytes)}"
        if failure.memory_limit_bytes:
            text += f" of {bytes_text(failure.memory_limit_bytes)}"
    return f"{text}: probably out of memory" if failure.oom_likely else text


def _order(failure: Failure) -> int:
    """0: failed by itself; 1: says only that a peer went away; 2: ended by us."""
    if failure.error is not None:
        return 1 if failure.error.get("echo") else 0
    return 2 if failure.sent_by_us else 0


def _when(failure: Failure) -> float:
    when = (failure.error or {}).get("time", failure.time)
    return float("inf") if when is None else float(when)


def _step(failure: Failure) -> int:
    return int((failure.error or {}).get("step", failure.step))


def _is_same(one: Failure, other: Failure) -> bool:
    """Both failed by themselves, with the same words (or the same signal)."""
    if _order(one) or _order(other) or (one.error is None) != (other.error is None):
        return False
    if one.error is None or other.error is None:
        return (one.signal, one.exit_code, one.oom_likely) == (other.signal, other.exit_code, other.oom_likely)
    return all(one.error.get(name) == other.error.get(name) for name in ("kind", "message"))


def _is_ours(frame: str) -> bool:
    match = FRAME.match(frame)
    path = match.group(1) if match else ""
    return path.startswith((PACKAGE, *STARTERS)) or path.endswith("runpy.py") or bool(OURS.search(path))


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"
