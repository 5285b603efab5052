"""The program that `paceline doctor` has a run's workers execute: all measure at once, and worker 0 reports.

It is a script like any other, so it runs wherever scripts do: on one machine, over SSH, on Slurm, Kubernetes and Ray.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import paceline
from paceline import clock, environment
from paceline.doctor.cluster_file import cluster_toml
from paceline.doctor.examine import examine, examine_apart, host_pairs
from paceline.doctor.findings import ClusterFinding, findings
from paceline.doctor.measured import Examination, HostPair, ScriptReading
from paceline.doctor.meeting import Meeting, store_meeting
from paceline.doctor.report import reading_lines, report_lines
from paceline.doctor.script_findings import reading_findings
from paceline.doctor.script_reading import AskedScript, read_script
from paceline.plan import CommandPlan
from paceline.plan.job import Assignment
from paceline.worker.run_member import parts_of
from paceline.worker.session import working_alone

__all__ = ["CLUSTER_FILE", "main"]

CLUSTER_FILE, RECORD_FILE = "cluster.toml", "examination.json"
ENGINE_FILE = "engine.json"  # of a run's directory, where an engine's job was submitted
ENDS = "# end of the cluster file"  # on the console


def main() -> None:
    """Be one worker of the examination; the arguments are those that `paceline doctor` gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--name", default="")
    parser.add_argument("--tell", action="store_true")
    parser.add_argument("--script", type=Path)
    parser.add_argument("--plan", type=json.loads)
    words, args = _split(sys.argv[1:])
    given = parser.parse_args(words)
    asked = None
    if given.script is not None:
        plan = CommandPlan() if given.plan is None else CommandPlan.from_table(given.plan)
        asked = AskedScript(path=given.script, plan=plan, args=args)
    own = environment.assignment()
    pairs: Sequence[HostPair] | None = None
    if own is not None:
        with store_meeting(own) as meeting:
            pairs = None if meeting is None else host_pairs(meeting, own, seconds=given.seconds)
            if meeting is not None and pairs is not None and any(pair.error is not None for pair in pairs):
                report_apart(meeting, own, pairs, seconds=given.seconds, name=given.name, tells=given.tell, asked=asked)
                return

    def report_all(worker: paceline.Worker) -> None:
        seen = examine(worker, seconds=given.seconds, pairs=pairs)
        path = parts_of(worker).files.run_dir / CLUSTER_FILE
        found = findings(seen)
        if worker.is_first:
            _report(seen, found, path, name=given.name, tells=given.tell)
        if asked is not None:
            reading = read_script(worker, asked, cluster=path, seconds=given.seconds)
            if worker.is_first:
                _report_reading(reading, seen, found, path)

    paceline.run(report_all, save_every_s=0)


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Our own words, and those of the script, behind "--"."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def report_apart(
    meeting: Meeting,
    own: Assignment,
    pairs: Sequence[HostPair],
    *,
    seconds: float,
    name: str,
    tells: bool,
    asked: AskedScript | None,
) -> None:
    """Report where some hosts cannot reach each other: with all that needs no run, which could not begin."""
    with working_alone(own) as device:
        seen = examine_apart(meeting, own, device, seconds=seconds, pairs=pairs)
        if own.rank != 0:
            return
        found, path = findings(seen), Path(own.run_dir) / CLUSTER_FILE
        _report(seen, found, path, name=name, tells=tells)
        if asked is not None:
            why = "its workers could not reach each other"
            _report_reading(ScriptReading(script=str(asked.path), rates=[], problem=why), seen, found, path)


def _report(seen: Examination, found: Sequence[ClusterFinding], path: Path, *, name: str, tells: bool) -> None:
    """Print what was found; write the cluster file, and all numbers beside it. `tells`: print the file, too, where its
    directory is not the one of the submitting machine.
    """
    when = datetime.datetime.fromtimestamp(clock.now(), tz=datetime.UTC).date().isoformat()
    text = cluster_toml(seen, name=name or seen.workers[0].host, when=when)
    path.write_text(text, encoding="utf-8")
    _record(path.parent, seen, found, None)
    print(*report_lines(seen, found), sep="\n", flush=True)
    if tells and not (path.parent / ENGINE_FILE).exists():
        print(f"{text}{ENDS}", flush=True)


def _report_reading(reading: ScriptReading, seen: Examination, found: Sequence[ClusterFinding], path: Path) -> None:
    more = reading_findings(reading, seen)
    _record(path.parent, seen, [*found, *more], reading)
    print(*reading_lines(reading, more), sep="\n", flush=True)


def _record(run_dir: Path, seen: Examination, found: Sequence[ClusterFinding], reading: ScriptReading | None) -> None:
    """Keep all that was measured as JSON."""
    record = {
        "examination": dataclasses.asdict(seen),
        "script": None if reading is None else dataclasses.asdict(reading),
        "findings": [dataclasses.asdict(one) for one in found],
    }
    (run_dir / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
