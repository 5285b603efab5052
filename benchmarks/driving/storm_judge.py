"""What is promised of a run under faults, and which of it a storm has broken: a sentence for each violation."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from driving.runs import losses_of
from driving.storm_plans import STEPS
from driving.storm_run import SAVE_EVERY, Start, Storm
from paceline.events import Regrouped
from paceline.monitor.audit.audit import audit
from paceline.monitor.records.event_reader import EventTail
from paceline.plan import ParameterServer

__all__ = ["violations"]

TOLERANCE = 1e-5  # of losses, relative; sums of other numbers of replicas round otherwise
LOSSY_TOLERANCE = 0.05  # where error feedback is lost with a replica, and what a codec rounds is rounded otherwise
CURVE_TOLERANCE = 0.25  # of the mean loss, where other replicas take other steps
TORCHS_OWN = ("torchinductor_", "torch_")  # a cache; what a killed loader was about to hand over
DESCRIPTOR_TEST = re.compile(r"tmp\w{8}")  # a DataLoader that loses a loader opens some: are there descriptors left?
LEFT_LIMIT_S = 30.0  # for processes to be gone
LOSES = ("kill", "kill two", "kill again", "kill at start", "kill in a save", "warm parent", "leave", "long pause")
# For each fault: exit statuses that it may cause, and what a message then has to name.
KILLED = r"killed by signal 9|was lost|were lost|SIGKILL|too few"
ENDS: dict[str, tuple[set[int], str]] = {
    **dict.fromkeys(("kill", "kill two", "kill again", "kill at start", "kill in a save"), ({76}, KILLED)),
    "kill all": ({-signal.SIGKILL}, ""),
    "supervisor": ({-signal.SIGKILL}, ""),
    "warm parent": ({76}, r"warm parent|" + KILLED),
    "notice": ({75, 128 + signal.SIGTERM}, r"SIGTERM|asked to"),
    "Ctrl-C": ({75, 128 + signal.SIGINT}, r"Ctrl-C|SIGINT|asked to"),
    "leave": ({75, 76}, r"SIGTERM|asked to|has left"),
    "pause": (set[int](), ""),
    "long pause": ({76}, r"silen|not answer|no heartbeat|" + KILLED),
    "supervisor paused": (set[int](), ""),
    "full disk": ({1}, r"[Nn]o space|disk"),
    "slow disk": (set[int](), ""),
    "loader error": ({1}, r"the planted error of a loader"),
    "loader killed": ({1, 76}, r"loader|DataLoader|reads"),
    "server": ({76}, r"parameter server"),
}


def violations(storm: Storm, like: dict[int, float]) -> list[str]:
    """What was promised and did not hold; `like`: the losses of the undisturbed run."""
    found = [*_ends(storm), *_steps(storm), *_losses(storm, like), *_records(storm), *_left(storm)]
    return [f"{text}" for text in found]


def _ends(storm: Storm) -> Iterator[str]:
    """Each start that did not finish has an exit status that fits what was done to it, and says why."""
    for start in storm.starts:
        if start.exit_code is None or start.exit_code == 0 or _was_asked_at_once(start):
            continue
        kinds = [fault.kind for fault in start.faults]
        earlier = [
            fault.kind for one in storm.starts[max(0, start.number - 2) : start.number - 1] for fault in one.faults
        ]
        if start.exit_code not in set().union(*(ENDS[kind][0] for kind in (*kinds, *earlier))):
            yield f"start {start.number} ended with {start.exit_code} after {kinds or 'nothing'}: {_tail(start)}"
            continue
        words = [ENDS[kind][1] for kind in kinds if start.exit_code in ENDS[kind][0]]
        if words and start.exit_code >= 0 and not re.search("|".join(words), start.says()):
            yield f"start {start.number} ended with {start.exit_code} and does not name {kinds}: {_tail(start)}"
        # An error that is planted when a start is about to end comes in the next one.
        if "Traceback" in start.says() and not {"loader error", "loader killed"} & {*kinds, *earlier}:
            yield f"start {start.number} shows a traceback after {kinds}: {_tail(start)}"


def _was_asked_at_once(start: Start) -> bool:
    """Whether SIGTERM came before the command could take notice of it: it has said nothing, and nothing was lost."""
    has_said = len(start.says().splitlines()) > 1  # the first line is the command
    return start.exit_code == -signal.SIGTERM and not has_said and any(one.kind == "notice" for one in start.faults)


def _steps(storm: Storm) -> Iterator[str]:
    """Each start goes on from the newest state that was saved, and no more is lost than since then."""
    attempts = _resumed(storm)
    for before, start in zip(storm.starts, storm.starts[1:], strict=False):
        resumed = attempts.get(start.number)
        if resumed is None:
            continue
        if resumed < start.saved_before:
            yield f"start {start.number} went on from step {resumed}, though step {start.saved_before} was saved"
        if before.exit_code == 75 and resumed < before.furthest:
            yield f"start {before.number} ended with 75 at step {before.furthest}, and the next went on from {resumed}"
        disks = any("disk" in fault.kind for one in (before, start) for fault in one.faults)
        interrupted = sum(fault.kind in LOSES for fault in before.faults)  # saves, at the most
        if before.furthest - resumed > (2 + interrupted) * SAVE_EVERY and not disks:
            yield f"{before.furthest - resumed} steps were lost before start {start.number}"
    if storm.plan.plan.sync.exact_with_fewer:
        lost = sum(event.steps_lost for event in _regrouped(storm))
        if lost:
            yield f"{lost} committed steps were lost in regrouping"


def _losses(storm: Storm, like: dict[int, float]) -> Iterator[str]:
    """All steps are there, with the losses of the undisturbed run as far as the plan promises that."""
    plan, losses = storm.plan.plan, losses_of(storm.run_dir)
    missing, extra = sorted(set(like) - set(losses)), sorted(set(losses) - set(like))
    if plan.is_asynchronous:
        return
    if missing or extra:
        yield f"the steps are not the same ones: missing {missing[:8]}, too many {extra[:8]}"
        return
    sync, hit = plan.sync, bool(storm.came)
    is_exact = not hit or (sync.exact_with_fewer and sync.exact_again)
    if not is_exact or (isinstance(sync, ParameterServer) and sync.drop):
        means = [sum(one.values()) / len(one) for one in (losses, like)]
        difference, most = abs(means[0] - means[1]) / means[1], CURVE_TOLERANCE
    else:
        difference = max(abs(losses[step] - loss) / abs(loss) for step, loss in like.items())
        most = TOLERANCE if plan.wire.exact or not hit else LOSSY_TOLERANCE
    if not difference <= most or math.isnan(difference):
        yield f"the loss differs by {difference:.1e} (tolerance {most:.0e})"


def _records(storm: Storm) -> Iterator[str]:
    """The audit is clean, and the commands that look at a run can read it."""
    result = audit(storm.run_dir)
    if result.verdict != "clean":
        says = [*result.problems, *(text for epoch in result.epochs for text in epoch.says)]
        yield f"the audit says {result.verdict}: {'; '.join(says)[:400]}"
    last = storm.starts[-1].says()
    if not re.search(rf"finished (already )?at step {STEPS}|is finished", last):
        yield f"the last start does not say that it has finished: {_tail(storm.starts[-1])}"
    words = [sys.executable, "-m", "paceline", "report", str(storm.run_dir)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        yield f"paceline report ends with {done.returncode}: {done.stdout[-200:]}{done.stderr[-300:]}"
    elif re.search(r"(?<![\w.-])-\d[\d.]*\s*(s|min|h)\b", done.stdout):
        yield "paceline report shows a negative duration"


def _left(storm: Storm) -> Iterator[str]:
    """Nothing is left behind: no process, no shared memory, no temporary file."""
    deadline = time.monotonic() + LEFT_LIMIT_S
    while (pids := storm.pids()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in pids:
        yield f"process {pid} is left: {_command_of(pid)}"
    for place in ("shm", "tmp"):
        left = sorted(path.name for path in (storm.folder / place).iterdir() if not _is_torchs(path))
        if left:
            yield f"left in {place}: {', '.join(left)[:300]}"
    partial = [
        path.name
        for path in storm.run_dir.glob("checkpoints/*")
        if ".partial-" in path.name or ".removed-" in path.name
    ]
    if partial:
        yield f"interrupted saves are left: {', '.join(partial)[:300]}"


def _is_torchs(path: Path) -> bool:
    """Whether torch has left it: its handler of SIGCHLD interrupts even the making of a file."""
    is_test = DESCRIPTOR_TEST.fullmatch(path.name) is not None and path.is_file() and path.stat().st_size == 0
    return is_test or path.name.startswith(TORCHS_OWN)


def _resumed(storm: Storm) -> dict[int, int]:
    """By start: the step from which its first worker went on."""
    by_start = dict[int, int]()
    for start in storm.starts:
        found = re.search(r"(?:resumed|going on|continu\w+) (?:from|at|with|behind) .*?step[_ ](\d+)", start.says())
        if found is not None:
            by_start[start.number] = int(found[1])
    return by_start


def _events(storm: Storm) -> Iterator[object]:
    number = 1
    while (storm.run_dir / f"attempt_{number}").exists():
        tail = EventTail(storm.run_dir, number)
        yield from (record.event for record in tail.poll(None))
        tail.close()
        number += 1


def _regrouped(storm: Storm) -> list[Regrouped]:
    return [event for event in _events(storm) if isinstance(event, Regrouped)]


def _command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "(gone)"


def _tail(start: Start) -> str:
    return " / ".join(start.says().strip().splitlines()[-6:])[-700:]
