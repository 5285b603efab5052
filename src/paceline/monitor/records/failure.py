"""Says why a run failed: the error that began it, first and once; everything that followed from it in one line."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import signal as signals
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.monitor.records.run_files import local_path
from paceline.plain_data import read_object
from paceline.regular_files import read_regular
from paceline.units import bytes_text, workers_text

__all__ = ["Failure", "explain", "headline", "is_consequence", "is_echo", "root_cause"]

PACKAGE = f"{Path(__file__).resolve().parents[2]}{os.sep}"  # where our own frames lie
OURS = re.compile(r"[\\/](site|dist)-packages[\\/]paceline[\\/]")  # the same on a host with another layout
STARTERS = ("<frozen runpy>", "<frozen importlib")  # what runs a script, above its own frames
COMMAND = "<string>"  # of `python -c`: the user's, or what has started a worker
CHAIN = re.compile(  # between the tracebacks of an error and of what it came from
    r"(\n\n(?:During handling of the above exception, another exception occurred"
    r"|The above exception was the direct cause of the following exception):\n\n)"
)
MARGIN = re.compile(r"^ +[|+] ")  # of an exception in a group
FRAME = re.compile(r'^  File "([^"]+)", line (\d+)')
TORCH = re.compile(r"[\\/](site|dist)-packages[\\/]torch[\\/]")
LOADER = re.compile(  # what torch makes of an error in a loader process
    r"Caught \w+ in DataLoader worker process (\d+)\.\nOriginal (Traceback \(most recent call last\):\n.*)", re.DOTALL
)
OF_ONE_WORKER = re.compile(r"worker_\d+[\\/]\w+\.\w+|\(in loader process \d+\)$")
MOST_BYTES = 8 << 20  # of an error.json that is read
EARLY = "os._exit() or a C library ended it"
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
    step: int = 0  # last step it had committed; error.json knows better, where there is one
    time: float | None = None  # when its end was seen, clock.now()
    peak_memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    oom_likely: bool = False
    sent_by_us: bool = False  # the signal: the supervisor ended this worker because of another one
    is_early: bool = False  # its process ended before its function had returned
    name: str = ""  # what messages call it; "": "worker" and its rank


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Return the failure the others follow from: errors before echoes, before those we ended; then the earliest."""
    if not failures:
        raise ValueError("there is no failure to choose from: pass at least one")
    return min(failures, key=lambda failure: (_order(failure), _when(failure), failure.worker))


def is_consequence(failure: Failure, failures: Sequence[Failure]) -> bool:
    """Say whether one of these failures only came of another one."""
    return _order(failure) != 0 and failure is not root_cause(failures)


def explain(failures: Sequence[Failure]) -> str:
    """Return what the user reads when a run has failed; the text ends without a newline."""
    if not failures:
        return ""
    first = root_cause(failures)
    equal = [failure for failure in failures if failure is first or _is_same(failure, first)]
    others = [failure for failure in failures if all(failure is not each for each in equal)]
    also = sorted((failure for failure in others if _order(failure) == 0), key=_when)
    followed = [failure for failure in others if _order(failure) != 0]
    if first.error and first.error.get("usage"):
        return f"paceline: {first.error.get('message', '')}{_where(str(first.error.get('traceback', '')))}"
    parts = [headline(first, equal)]
    if first.error and not first.error.get("says_all"):
        parts += _traceback_parts(first.error)
    if first.error and first.error.get("stacks"):  # of all workers, where one has kept the others waiting
        parts.append(str(first.error["stacks"]))
    if first.oom_likely:
        parts.append("If so, use a smaller Batch(micro=...): a step then needs less memory and gives the same result.")
    parts += [f"{headline(failure)} (independently)" for failure in also]
    if followed:
        parts.append(f"{_subjects(followed)} stopped because of it")
    return "\n".join(parts)


def headline(failure: Failure, equal: Sequence[Failure] = ()) -> str:
    """Return one line that names the worker that failed, where, when and why; `equal` are the failures of the same
    kind.
    """
    what = _what(failure)
    if failure.error and failure.error.get("names_workers"):
        return str(failure.error.get("message", ""))
    if len(equal) > 1:
        hosts = ", ".join(dict.fromkeys(each.host for each in equal))
        subject = f"{_subjects(equal)} ({'hosts' if ',' in hosts else 'host'} {hosts})"
        if failure.error is None:
            plural = what.replace("was killed", "were all killed", 1).replace("ended with", "all ended with", 1)
            return f"{subject} {plural}"
        return f"{subject} all failed with the same error{_when_failed(failure)}: {what}"
    subject = f"{failure.name or f'worker {failure.worker}'} (host {failure.host}, pid {failure.pid})"
    return f"{subject} failed{_when_failed(failure)}: {what}" if failure.error else f"{subject} {what}"


def _subjects(failures: Sequence[Failure]) -> str:
    """Return "workers 0-2", or the names of workers that are called otherwise: "chief, server 0"."""
    if all(failure.name in ("", f"worker {failure.worker}") for failure in failures):
        return workers_text(failure.worker for failure in failures)
    return ", ".join(failure.name or f"worker {failure.worker}" for failure in failures)


def _traceback_parts(error: Mapping[str, Any]) -> list[str]:
    """The user's frames, and where the others are, if some are left out."""
    _, _, trace = _told(error)
    if not trace:
        return []
    shown, log = own_frames(trace), str(error.get("log") or "")
    return [shown, f"(all frames: {local_path(log)})"] if log and shown != trace.rstrip("\n") else [shown]


def own_frames(traceback: str) -> str:
    """Return a traceback with the user's frames: those of Paceline and torch above the first one are left out, and
    runs of them below it become one line. A traceback without a frame of the user's stays as it is."""
    blocks = itertools.groupby(traceback.rstrip("\n").split("\n"), key=_margin_width)
    return "\n".join(_within_margin(list(lines), width) for width, lines in blocks)


def _margin_width(line: str) -> int:
    """How many characters at a line's begin are the margin of an exception in a group; 0: none is in a group."""
    margin = MARGIN.match(line)
    return margin.end() if margin else 0


def _within_margin(lines: list[str], width: int) -> str:
    text = "\n".join(line[width:] for line in lines)
    shown = "".join(part if CHAIN.match(part) else _own_frames(part) for part in CHAIN.split(text))
    first, *others = shown.split("\n")
    side = lines[0][:width].replace("+", "|")
    return "\n".join([lines[0][:width] + first, *((side + line).rstrip() for line in others)])


def _own_frames(traceback: str) -> str:
    lines = traceback.split("\n")
    starts = [number for number, line in enumerate(lines) if FRAME.match(line)]
    # An error's message may hold another traceback, as that of a `WorkerError` does.
    end = next((n for n in range(starts[0], len(lines)) if not lines[n].startswith(" ")), len(lines)) if starts else 0
    owners = {start: _owner(lines[start]) for start in starts if start < end}
    if all(owners.values()):
        # Without a file of the user's, the program was given on the command line.
        owners = {start: "" if _is_of_command(lines[start]) else owner for start, owner in owners.items()}
    if all(owners.values()):
        return traceback
    shown: list[str] = []
    folded: list[str] = []  # whose frames they were
    for start, stop in itertools.pairwise([*owners, end]):
        if owners[start]:
            folded.append(owners[start])
            continue
        if shown:
            shown += _fold(folded)
        folded = []
        shown += lines[start:stop]
    return "\n".join([*lines[: starts[0]], *shown, *_fold(folded), *lines[end:]])


def _fold(owners: Sequence[str]) -> list[str]:
    """The line that stands for frames of these owners, if there are any."""
    count = "1 frame" if len(owners) == 1 else f"{len(owners)} frames"
    return [f"  ... {count} in {', '.join(dict.fromkeys(owners))}"] if owners else []


def _where(traceback: str) -> str:
    """Return " (train.py, line 7)": the user's last line in a traceback; nothing where there is none."""
    frames = [match for line in traceback.split("\n") if (match := FRAME.match(line)) and not _owner(line)]
    return f" ({local_path(frames[-1].group(1))}, line {frames[-1].group(2)})" if frames else ""


def _told(error: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return kind, message and traceback as the user's code made them, also where a loader process was between."""
    kind, message, trace = (str(error.get(name, "")) for name in ("kind", "message", "traceback"))
    loader = LOADER.match(message)
    if loader is None:
        return kind or "error", message, trace
    trace = loader.group(2).rstrip("\n")
    lines = trace.split("\n")
    last_frame = max((number for number, line in enumerate(lines) if FRAME.match(line)), default=0)
    said = itertools.dropwhile(lambda line: line.startswith(" "), lines[last_frame + 1 :])
    kind, _, message = "\n".join(said).partition(": ")
    return kind, f"{message} (in loader process {loader.group(1)})", trace


def _what(failure: Failure) -> str:
    if failure.error is not None:
        kind, message, _ = _told(failure.error)
        short = " ".join(message.split())
        if len(short) > MESSAGE_WIDTH and not (failure.error.get("usage") or failure.error.get("says_all")):
            short = short[: MESSAGE_WIDTH - 3] + "..."
        return f"{kind}: {short}" if short else kind
    if failure.signal is None:
        text = f"ended with exit code {failure.exit_code} {_after(failure)}"
        why = f"before its function had returned: {EARLY}" if failure.is_early else "without an error of its own"
        return f"{text}, {why}; see its stderr.log"
    text = f"was killed by signal {failure.signal} ({_signal_name(failure.signal)}) {_after(failure)}"
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
    """The error may come from where steps are not known, and the record may be behind the error."""
    return max(failure.step, int((failure.error or {}).get("step") or 0))


def _after(failure: Failure) -> str:
    """The last step that was committed: the one in hand has the next number."""
    step = _step(failure)
    return f"after step {step}" if step else "before the end of the first step"


def _when_failed(failure: Failure) -> str:
    """The same behind a blank; nothing for another framework's program, whose steps are not known."""
    return "" if (failure.error or {}).get("is_program") else f" {_after(failure)}"


def _is_same(one: Failure, other: Failure) -> bool:
    """Both failed by themselves, with the same words (or the same signal)."""
    if _order(one) or _order(other) or (one.error is None) != (other.error is None):
        return False
    if one.error is None or other.error is None:
        return (one.signal, one.exit_code, one.oom_likely) == (other.signal, other.exit_code, other.oom_likely)
    return _key(one.error) == _key(other.error)


def _key(error: Mapping[str, Any]) -> tuple[str, str]:
    """Equal for errors that say the same, each of its own worker's files or loader process."""
    kind, message, _ = _told(error)
    return kind, OF_ONE_WORKER.sub("", message)


def _owner(frame: str) -> str:
    """Return the owner of a frame: "paceline", "torch", or "" for the user's code and other libraries."""
    match = FRAME.match(frame)
    path = match.group(1) if match else ""
    if path == COMMAND or path.startswith((PACKAGE, *STARTERS)) or path.endswith("runpy.py") or OURS.search(path):
        return "paceline"
    return "torch" if TORCH.search(path) else ""


def _is_of_command(frame: str) -> bool:
    match = FRAME.match(frame)
    return match is not None and match.group(1) == COMMAND


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:  # a real-time signal
        return f"SIG{number}"


def is_echo(path: Path) -> bool:
    """Return whether an error only reports that a peer was lost."""
    try:
        return bool(read_object(read_regular(path, MOST_BYTES)).get("echo"))
    except (OSError, ValueError):  # being written at this moment, or cut off: an error all the same
        return False
