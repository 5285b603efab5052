"""The HTML of a run in a notebook: one block, without scripts, in colors for light and dark pages."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence

from paceline.events import Evaluated
from paceline.monitor.console.progress import SHORT_PHASES, idle_texts, number_text, rate_text
from paceline.monitor.records.steps import OTHER, PHASES, Step
from paceline.units import printable

__all__ = ["NotebookView", "html_of"]

WIDTH, HEIGHT = 600, 96  # of the curve, in its own units
COLORS: dict[str, str] = dict(
    zip((*PHASES, OTHER), ("#c99700", "#2e9e55", "#b455c8", "#3b82d6", "#d9534f", "#8a8f98"), strict=True)
)
STATES = {"running": "#3b82d6", "finished": "#2e9e55", "failed": "#d9534f", "stopped": "#c99700"}
MARKS = {
    "starting": ("○", "#8a8f98"),
    "joining": ("○", "#c99700"),
    "working": ("●", "#2e9e55"),
    "finished": ("✓", "#3b82d6"),
    "lost": ("✗", "#d9534f"),
    "left": ("·", "#8a8f98"),
}
MOST_MARKS = 64
BLOCK = "font:13px/1.6 system-ui,sans-serif;max-width:46em;padding:.3em 0;color:inherit"
TRACK = "background:rgba(128,128,128,.28);border-radius:3px;overflow:hidden;height:8px;display:flex"
PRE = (
    "margin:.4em 0 0;padding:.4em .6em;max-height:15em;overflow:auto;white-space:pre-wrap;color:inherit;"
    "background:rgba(128,128,128,.12);border-radius:3px;font:12px/1.45 ui-monospace,monospace"
)


@dataclasses.dataclass(kw_only=True, slots=True)
class NotebookView:
    """What the block shows."""

    run: str
    workers: int
    state: str = "running"  # finished | failed | stopped
    plan: str = ""
    row: Step | None = None  # the last one
    epoch: str = ""
    last_step: int | None = None
    left_s: float | None = None
    passed_s: float = 0.0
    samples_per_s: float | None = None
    shares: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    idle: Mapping[int, float] = dataclasses.field(default_factory=dict[int, float])
    marks: Mapping[int, str] = dataclasses.field(default_factory=dict[int, str])
    curve: Sequence[tuple[float, float]] = ()
    evaluated: Evaluated | None = None
    checkpoint_step: int | None = None
    lines: Sequence[str] = ()
    num_lines_before: int = 0
    text: str = ""  # the line of progress


def html_of(view: NotebookView) -> str:
    """Return the block."""
    parts = [_title(view), _progress(view), _curve(view), _times(view), _facts(view), _output(view)]
    return f'<div class="paceline-run" style="{BLOCK}">{"".join(parts)}</div>'


def _title(view: NotebookView) -> str:
    state = f'<b style="color:{STATES[view.state]}">{view.state}</b>'
    plan = f" <code>{_safe(view.plan)}</code>" if view.plan else ""
    return f"<div>{state} &nbsp;{_clock(view.passed_s)} &nbsp;{_safe(view.run)}{plan}</div>"


def _progress(view: NotebookView) -> str:
    row = view.row
    if row is None:
        ready = view.marks and "starting" not in view.marks.values()
        waits = "the first step is under way" if ready else "starting the workers"
        return f"<div>{waits}</div>" if view.state == "running" else ""
    numbers, bar = [f"step <b>{row.step}</b>"], ""
    if view.last_step:
        share = min(1.0, row.step / view.last_step)
        numbers = [f"step <b>{row.step}</b> of {view.last_step}", f"{share:.0%}"]
        filled = f'<div style="width:{100 * share:.2f}%;background:{STATES[view.state]}"></div>'
        bar = f'<div role="progressbar" aria-valuenow="{100 * share:.0f}" style="{TRACK}">{filled}</div>'
    numbers += [view.epoch] if view.epoch else []
    numbers += [f"{_clock(view.left_s)} left"] if view.left_s is not None else []
    if view.samples_per_s is not None:
        numbers.append(f"{rate_text(view.samples_per_s)} samples/s")
    return f"<div>{_joined(numbers)}</div>{bar}"


def _curve(view: NotebookView) -> str:
    row = view.row
    if row is None:
        return ""
    numbers = [f"loss <b>{number_text(row.loss)}</b>"] if row.loss is not None else []
    numbers += [f"{_safe(name)} {number_text(value)}" for name, value in row.metrics.items()]
    if len(view.curve) < 2:
        return f"<div>{_joined(numbers)}</div>" if numbers else ""
    steps, losses = [step for step, _ in view.curve], [loss for _, loss in view.curve]
    low, high = min(losses), max(losses)
    wide, tall = (steps[-1] - steps[0]) or 1.0, (high - low) or 1.0
    points = " ".join(
        f"{(step - steps[0]) / wide * WIDTH:.1f},{3 + (high - loss) / tall * (HEIGHT - 6):.1f}"
        for step, loss in view.curve
    )
    label = f"loss from {number_text(losses[0])} to {number_text(losses[-1])}"
    picture = (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" '
        f'style="width:100%;height:{HEIGHT}px;display:block;background:rgba(128,128,128,.12);border-radius:3px">'
        f'<polyline points="{points}" fill="none" stroke="{STATES["running"]}" stroke-width="1.8" '
        'vector-effect="non-scaling-stroke"/></svg>'
    )
    ends = _joined([f"step {steps[0]:.0f} to {steps[-1]:.0f}", f"least {number_text(low)}, most {number_text(high)}"])
    return f'<div>{_joined(numbers)}</div>{picture}<div style="opacity:.7;font-size:12px">{ends}</div>'


def _times(view: NotebookView) -> str:
    if not view.shares:
        return ""
    bars = "".join(
        f'<div style="width:{100 * share:.2f}%;background:{COLORS[phase]}"></div>'
        for phase, share in view.shares.items()
    )
    names = _joined(
        [
            f'<span style="color:{COLORS[phase]}">■</span> {SHORT_PHASES[phase]} {share:.0%}'
            for phase, share in view.shares.items()
        ]
    )
    return f'<div style="{TRACK};margin-top:.4em">{bars}</div><div>{names}</div>'


def _facts(view: NotebookView) -> str:
    marks = [(worker, *MARKS[mark]) for worker, mark in sorted(view.marks.items())]
    dots = "".join(
        f'<span title="worker {worker}" style="color:{color}">{sign}</span>'
        for worker, sign, color in marks[:MOST_MARKS]
    )
    more = f" and {len(marks) - MOST_MARKS} more" if len(marks) > MOST_MARKS else ""
    facts = [f"workers {dots}{more} {view.workers}"]
    if idle := idle_texts(dict(view.idle)):
        facts.append(f"idle {_safe(' '.join(idle))}")
    if view.evaluated is not None:
        values = _joined([f"{_safe(name)} {number_text(value)}" for name, value in view.evaluated.metrics.items()])
        facts.append(f"held out {values} at step {view.evaluated.step}")
    if view.checkpoint_step is not None:
        facts.append(f"checkpoint step {view.checkpoint_step}")
    return "".join(f"<div>{fact}</div>" for fact in facts)


def _output(view: NotebookView) -> str:
    if not view.lines:
        return ""
    before = f"({view.num_lines_before} lines before: paceline logs {view.run})\n" if view.num_lines_before else ""
    lines = "\n".join(map(_line, view.lines))
    return f'<pre style="{PRE}">{html.escape(before)}{lines}</pre>'


def _line(text: str) -> str:
    """A line of output: what a carriage return has overwritten is left out, and so are a program's colors."""
    return _safe(text.rstrip("\r").rpartition("\r")[2])


def _safe(text: str) -> str:
    return html.escape(printable(text))


def _joined(parts: Sequence[str]) -> str:
    return " &nbsp;".join(part for part in parts if part)


def _clock(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}" if hours else f"{minutes}:{whole:02}"
