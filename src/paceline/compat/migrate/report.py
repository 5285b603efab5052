"""The report of `paceline migrate --check`, as text and as JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json

from paceline.compat.migrate.check import CallFinding, MigrationReport
from paceline.units import printable

__all__ = ["report_json", "report_text"]


def report_json(report: MigrationReport) -> str:
    """Return the report as one JSON object."""
    return json.dumps({**dataclasses.asdict(report), "num_refused": report.num_refused}, indent=1)


def report_text(report: MigrationReport) -> str:
    """Return a table of the calls by file, and below it what to change and how to start."""
    lines: list[str] = []
    if not report.findings:
        lines.append(_nothing(report))
    for file, group in itertools.groupby(report.findings, key=lambda finding: finding.file):
        lines += [printable(file), *_rows(list(group)), ""]
    lines += [f"{path} could not be parsed, and is not in this list" for path in report.unread]
    if report.findings:
        counts = [
            (kind, sum(one.verdict == kind for one in report.findings)) for kind in ("works", "counterpart", "refused")
        ]
        lines.append(", ".join(f"{count} {_named(kind, count)}" for kind, count in counts if count))
    for before, after in report.changes:
        lines += ["change", f"  - {before}", f"  + {after}"]
    if report.starts:
        lines += ["start with", *(f"  {one}" for one in report.starts)]
    return "\n".join(lines)


def _rows(findings: list[CallFinding]) -> list[str]:
    """Equal calls of one file share a row, with all their lines."""
    merged: dict[tuple[str, str, str, str], list[int]] = {}
    for one in findings:
        merged.setdefault((one.call, one.framework, one.verdict, one.says), []).append(one.line)
    names = [_lines_text(lines) for lines in merged.values()]
    width = max(map(len, names))
    calls = max(len(call) for call, *_ in merged)
    frameworks = max(len(framework) for _, framework, *_ in merged)
    return [
        f"  {name:<{width}}  {printable(call):<{calls}}  {framework:<{frameworks}}  {_verdict_text(verdict, says)}"
        for name, (call, framework, verdict, says) in zip(names, merged, strict=True)
    ]


def _lines_text(lines: list[int]) -> str:
    shown = list(dict.fromkeys(lines))
    return ", ".join(map(str, shown[:4])) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _verdict_text(verdict: str, says: str) -> str:
    if verdict == "works":
        return f"works ({says})" if says else "works"
    return f"{'use' if verdict == 'counterpart' else 'refused:'} {says}"


def _named(kind: str, count: int) -> str:
    words = {"works": ("works", "work"), "counterpart": ("has a counterpart", "have a counterpart")}
    one, many = words.get(kind, ("is refused", "are refused"))
    return one if count == 1 else many


def _nothing(report: MigrationReport) -> str:
    if report.is_paceline:
        return f"{report.script} is a program of Paceline, and has no distributed call of another framework"
    return (
        f"{report.script} has no distributed call of torch, Horovod, Keras, TensorFlow, DeepSpeed or Accelerate: it "
        "trains in one process. How a training loop is given to workers: docs/tutorials/your-own-model.md"
    )
