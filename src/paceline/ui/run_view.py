"""One run as its page shows it, kept up to date while somebody watches.

Each part has the revision in which it changed last, so that a page gets only what is new. Parts that cost more than a
look at file sizes are read seldom: each takes at most a tenth of the time. Where nobody watches, nothing is read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.monitor.records.run_record import RUNNING, RunRecord
from paceline.monitor.status.status import RunStatus, status
from paceline.ui.log_lines import logs_size
from paceline.ui.metrics_index import FollowedMetrics
from paceline.ui.plan_facts import plan_parts
from paceline.ui.pool_history import Decision
from paceline.ui.pool_pauses import with_pauses
from paceline.ui.run_events import RunEvents
from paceline.ui.run_place import RunPlace
from paceline.ui.run_summary import FileStamp, RunSummary, program_text, summary_of
from paceline.ui.worker_places import worker_places
from paceline.units import printable

__all__ = ["RunView"]

CURVES_S = 0.15  # of a look, for reading metrics
EVENTS_S = 0.1
SUMMARY_EVERY_S = 20.0  # from its files; in between, from the rows that are read for the curves
STATUS_EVERY_S, STATUS_STILL_S = 15.0, 2.0  # while steps come and nothing happens, and otherwise
SHARE = 10  # a part that took so long waits so many times as long
LOGS_EVERY_S = 1.0
REPORT_EVERY_S = 30.0
REPORT_SHARE = 1000
REPORT_SOON_S = 2.0  # after an incident
REPORT_FRESH_S, REPORT_FRESH_SHARE = 2.0, 4  # a page that is opened has another one made where it is older
JOB_SHOWN = (
    "program",
    "args",
    "run_for",
    "workers",
    "servers",
    "hosts",
    "launcher",
    "device",
    "threads",
    "max_steps",
    "save_every",
    "save_every_s",
    "keep",
    "balance",
    "noise_scale",
    "cluster",
    "run_dir",
)


class RunView:
    """Call its methods from one thread at a time."""

    def __init__(self, run_dir: Path, name: str) -> None:
        self.run_dir, self.name = run_dir, name
        self._record, self._rows = run_dir / "run.json", run_dir / "metrics.jsonl"
        self.revision = 1
        self.summary: RunSummary | None = None  # when its files were read last
        self._facts: dict[str, Any] = {}  # of it
        self._metrics = FollowedMetrics(self._rows)
        self._events = RunEvents(run_dir)
        self._parts: dict[str, tuple[int, Any]] = {}
        self._stamps: tuple[FileStamp, ...] = ()
        self._summed = _Cadence(SUMMARY_EVERY_S, SHARE)
        self._looked = _Cadence(STATUS_EVERY_S, SHARE)
        self._looked_at_rows = 0  # how many there were then
        self._is_calm = True  # nothing but steps since then
        self._logs = _Cadence(LOGS_EVERY_S, SHARE)
        self._report = _Cadence(REPORT_EVERY_S, REPORT_SHARE)
        self._read_report: dict[str, Any] | None = None
        self._decisions: Sequence[Decision] = ()
        self._is_report_wanted = False
        self._reported_incidents = -1
        self._reported_state: str | None = None

    def look(self) -> None:
        """Read what has changed; costs a few `stat` calls where nothing has."""
        self._metrics.poll(CURVES_S)
        is_new = self._look_at_summary()
        attempt = self.summary.attempt if self.summary is not None else 0
        has_happened = bool(attempt) and self._events.poll(attempt, EVENTS_S)
        if has_happened:
            self._put("events", self._events.lines())
            self._put("evaluations", self._events.evaluations())
        is_on = self.summary is not None and self.summary.state == RUNNING
        is_new_record = self._is_new_record()
        self._is_calm = self._is_calm and not has_happened
        is_still = self._looked_at_rows == self._metrics.index.num_rows
        after_s = STATUS_EVERY_S if self._is_calm and not is_still else STATUS_STILL_S
        if (is_on or is_new or is_new_record) and self._looked.is_due(also=is_new and is_new_record, after_s=after_s):
            self._looked_at_rows, self._is_calm = self._metrics.index.num_rows, True
            self._looked.begin()
            self._look_at_workers()
            self._looked.end()
        if attempt and self._logs.is_due():
            self._logs.begin()
            self._put("logs", {"attempt": attempt, "size": logs_size(self.run_dir, attempt)})
            self._logs.end()

    def changes(self, since: tuple[int, int]) -> dict[str, Any] | None:
        """Return the parts that a page lacks which has seen these revisions (of parts, and of curves); None: none."""
        seen, seen_curves = since
        if seen > self.revision or seen_curves > self._metrics.revision:  # of another server
            seen = seen_curves = 0
        found: dict[str, Any] = {name: part for name, (revision, part) in self._parts.items() if revision > seen}
        curves = self._metrics.changes(seen_curves)
        if self._metrics.revision > seen_curves:
            found["curves"] = {
                "whole": self._metrics.is_replaced_since(seen_curves) or seen_curves == 0,
                "is_exact": self._metrics.is_whole,
                "series": curves,
            }
        if not found:
            return None
        return found | {"revisions": [self.revision, self._metrics.revision]}

    @property
    def is_catching_up(self) -> bool:
        """Whether there are rows that were not read so far."""
        return not self._metrics.is_whole

    def is_opened(self) -> None:
        """Note that a page was opened: it is to see an account of its time that is not old."""
        self._is_report_wanted = self._report.is_due(after_s=REPORT_FRESH_S, share=REPORT_FRESH_SHARE)

    def is_report_due(self) -> bool:
        """Whether the account of its time is worth another reading: the run goes on, or has ended, or something has
        happened to it, or a page was opened."""
        state = self.summary.state if self.summary is not None else None
        if state is None or state == "unreadable":
            return False
        if state != self._reported_state:
            return self._report.is_due(also=state != RUNNING, after_s=REPORT_SOON_S)
        if self._events.num_incidents != self._reported_incidents:
            return self._report.is_due(after_s=REPORT_SOON_S)
        return state == RUNNING and self._report.is_due(also=self._is_report_wanted)

    def begin_report(self) -> None:
        """Note that the report is being read; what happens from now on is not in it."""
        age_s = self._report.age_s
        self._report.begin()
        self._is_report_wanted = False
        self._reported_incidents = self._events.num_incidents
        self._reported_state = self.summary.state if self.summary is not None else None
        self._put("reading", {"is_on": True, "age_s": None if age_s is None else round(age_s, 1)})

    def end_report(self, report: dict[str, Any]) -> None:
        """Take the report, or `{"problem": ...}`."""
        self._report.end()
        self._read_report = report
        self._put_report()
        self._put("reading", {"is_on": False, "age_s": 0.0})

    def belongs_to(self, groups: list[dict[str, Any]], place: RunPlace, decisions: Sequence[Decision] = ()) -> None:
        """Take which pools and sweeps it belongs to, where it stands in them, and what pools decided on it."""
        self._put("groups", groups)
        self._put("place", place.facts())
        self._decisions = decisions
        self._put_report()

    def close(self) -> None:
        """Close its files."""
        self._events.close()

    def _look_at_summary(self) -> bool:
        """Read it where its files have changed; between such readings, take what the curves' newest rows say. Returns
        whether it was read."""
        stamps = (FileStamp.of(self._record), FileStamp.of(self._rows))
        if stamps == self._stamps:
            return False
        is_first = self.summary is None or self.summary.at is None  # the first row tells where the run is to end
        is_read = self._summed.is_due(also=is_first or stamps[:1] != self._stamps[:1])
        if is_read:
            self._summed.begin()
            self.summary = summary_of(self.run_dir, self.name, with_spark=False)
            self._facts = self.summary.facts()
            self._stamps = stamps
            self._summed.end()
        elif self.summary is not None and self._metrics.is_whole:
            self._facts |= self.summary.after(self._metrics.index.newest)
        if self.summary is not None:
            self._put("summary", self._facts | self._of_curves())
        return is_read

    def _is_new_record(self) -> bool:
        known = self._parts.get("about")
        return known is None or self.summary is None or known[1].get("state") != self.summary.state

    def _look_at_workers(self) -> None:
        try:
            record = RunRecord.load(self.run_dir)
            now = status(self.run_dir)
        except ValueError as error:
            self._put("about", {"state": "unreadable", "problem": printable(str(error))})
            return
        if self.summary is not None and self.summary.state != now.state:  # its process has ended
            self.summary = dataclasses.replace(self.summary, state=now.state)
            self._facts["state"] = now.state
            self._put("summary", self._facts | self._of_curves())
        self._put("about", _about(record, now))
        self._put("workers", worker_places(now))

    def _of_curves(self) -> dict[str, Any]:
        index = self._metrics.index
        return {
            "first_loss": index.first_loss,
            "num_broken": index.num_broken,
            "num_skipped": index.num_skipped,
            "num_metrics_left_out": index.num_metrics_left_out,
            "num_damaged": index.num_damaged,
        }

    def _put_report(self) -> None:
        report = self._read_report
        if report is not None:
            self._put("report", with_pauses(report, self._decisions) if "incidents" in report else report)

    def _put(self, name: str, part: Any) -> None:
        if name not in self._parts or self._parts[name][1] != part:
            self.revision += 1
            self._parts[name] = (self.revision, part)


class _Cadence:
    """When a part is to be read again: after `every_s`, and after `share` times what the last reading took."""

    def __init__(self, every_s: float, share: float) -> None:
        self._every_s, self._share = every_s, share
        self._began_s = self._ended_s = 0.0
        self._took_s: float | None = None

    def is_due(self, *, also: bool = False, after_s: float | None = None, share: float | None = None) -> bool:
        """Whether it is time; `also`: at once; `after_s`, `share`: in place of the usual ones."""
        if self._took_s is None or also:
            return True
        every_s, share = self._every_s if after_s is None else after_s, self._share if share is None else share
        return time.monotonic() - self._ended_s >= max(every_s, share * self._took_s)

    @property
    def age_s(self) -> float | None:
        """Seconds since the reading that was done last began; None: there was none."""
        return None if self._took_s is None else time.monotonic() - self._began_s

    def begin(self) -> None:
        self._began_s = time.monotonic()

    def end(self) -> None:
        self._ended_s = time.monotonic()
        self._took_s = self._ended_s - self._began_s


def _about(record: RunRecord, now: RunStatus) -> dict[str, Any]:
    """What the run is: job and plan; and what its supervisor has said last."""
    job = {name: value for name in JOB_SHOWN if (value := record.job.get(name)) not in (None, "", [], ())}
    plan = now.plan or ""
    return {
        "name": printable(record.run_dir.resolve().name),
        "run_dir": printable(str(record.run_dir.resolve())),
        "state": now.state,
        "is_checked": now.is_checked,
        "exit_code": now.exit_code,
        "host": printable(now.host),
        "pid": now.pid,
        "program": program_text(record.job),
        "plan": printable(plan),
        "asked": printable(record.plan or ""),
        "parts": plan_parts(plan) if now.tasks is None else {},
        "tasks": None if now.tasks is None else printable(now.tasks),
        "job": {name: printable(_shown(value)) for name, value in job.items()},
        "attempts": [dataclasses.asdict(each) for each in record.attempts[-50:]],
        "num_attempts": len(record.attempts),
        "members": len(now.members),
        "epochs": now.progress.epochs,
        "stands_still": now.stands_still,
        "error": printable(now.trouble.error or ""),
        "warning": printable(now.trouble.warning or ""),
        "metrics_url": now.metrics_url,
        "left_out": [printable(text) for text in now.left_out[:20]],
    }


def _shown(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
