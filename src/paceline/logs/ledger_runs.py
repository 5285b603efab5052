"""Lines of a sample ledger that differ only by a constant distance are one: a run of steps.

A worker of a fixed plan runs the same part of each batch: steps 1, 2, 3, ... with positions 0-16, 512-528, 1024-1040.
Such a run is its first line and three numbers; the epochs that repeat it are a cycle, and four numbers more:

    {"step": 1, "stream": "train", "epoch": 0, "ranges": [[0, 16]], "skipped": false, "more": [96, 1, 512]}
    {"runs": [<line>, <line>], "more": [40, 98, 1, 0]}

Where shares are uneven, or each step is another worker's, the same few runs come in an irregular order. They are a
mixture: the kinds of run, the distances that occur between one run and the next, and which of them comes when.

    {"runs": [<line>, <line>], "next": [[0, 0, 0, 0], [1, 1, 0, 512], [0, 2, 0, 1024]], "order": [0, 1, 2, 1, 1, 2]}

`next`: a run's place in `runs`, and the steps, epochs and positions that it begins after the end of the run before.
Steps count from the run before, epochs and positions from that of the same stream; the first ones from the listed runs.

`more` of a run: lines that follow, and from one to the next the steps and positions between them. `more` of a cycle:
repetitions that follow, and from one to the next the steps, epochs and positions between them. Nothing is lost: the
lines can be written again from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from paceline.plain_data import MOST_WHOLE, read_object, text_of, whole

__all__ = ["MOST_LINES", "Run", "Shape", "join_runs", "merge_ledger", "run_of", "runs_in"]

Line = dict[str, Any]
Kind = tuple["Shape", int, int, int]  # of runs that differ only in where they begin
Ranges = tuple[tuple[int, int], ...]
KEYS = frozenset({"step", "stream", "epoch", "ranges", "skipped", "whole", "dropped", "behind"})
LONGEST = 8  # runs of a cycle that are looked for
LEAST_SAVED = 8  # runs that a cycle replaces; one that replaces fewer may be part of a mixture
LEAST_MIXED = 16  # runs of a mixture
MOST_LINES = 1 << 18  # that one stands for: a damaged number may not cost a reader its memory


class Shape(NamedTuple):
    """What lines of a run have in common; positions count from the run's base."""

    stream: str
    skipped: bool
    behind: int | None
    ranges: Ranges
    whole: tuple[int, int] | None
    dropped: Ranges | None


class Run(NamedTuple):
    """`num` lines: each `stride` steps and `shift` positions after the one before."""

    shape: Shape
    step: int
    epoch: int
    base: int
    num: int = 1
    stride: int = 1
    shift: int = 0

    @property
    def last_step(self) -> int:
        return self.step + (self.num - 1) * self.stride

    def part(self, begin: int, end: int) -> Run:
        """Lines `begin` to `end` - 1. One line alone is as it was read: it has no distance to a next one."""
        step, base, num = self.step + begin * self.stride, self.base + begin * self.shift, end - begin
        stride, shift = (self.stride, self.shift) if num > 1 else (1, 0)
        return Run(self.shape, step, self.epoch, base, num, stride, shift)

    def before(self, step: int) -> int:
        """How many lines are of steps before this one."""
        return min(max(-((self.step - step) // self.stride), 0), self.num)

    def moved(self, steps: int, epochs: int, positions: int) -> Run:
        step, epoch, base = self.step + steps, self.epoch + epochs, self.base + positions
        return Run(self.shape, step, epoch, base, self.num, self.stride, self.shift)

    def line(self) -> Line:
        """The first line as it was written."""
        shape, base = self.shape, self.base
        line: Line = {"step": self.step, "stream": shape.stream, "epoch": self.epoch}
        line |= {"ranges": [[base + a, base + b] for a, b in shape.ranges], "skipped": shape.skipped}
        if shape.whole is not None:
            line["whole"] = [base + edge for edge in shape.whole]
        if shape.dropped is not None:
            line["dropped"] = [[base + a, base + b] for a, b in shape.dropped]
        if shape.behind is not None:
            line["behind"] = shape.behind
        return line

    def each(self) -> Iterator[Run]:
        """Its lines, each as a run of its own."""
        return (self.part(index, index + 1) for index in range(self.num))

    def lines(self) -> Iterator[Line]:
        """All lines as they were written."""
        return (one.line() for one in self.each())


def run_of(line: Line) -> Run:
    """Return the run that a line of a step is; raises KeyError, TypeError or ValueError where it is none."""
    ranges = [_edges(one) for one in line["ranges"]]
    dropped = [_edges(one) for one in line["dropped"]] if "dropped" in line else None
    span = _edges(line["whole"]) if line.get("whole") is not None else None
    base = span[0] if span is not None else ranges[0][0] if ranges else dropped[0][0] if dropped else 0
    shape = Shape(
        text_of(line["stream"]),
        bool(line["skipped"]),
        _any_whole(line["behind"]) if line.get("behind") is not None else None,
        tuple((start - base, stop - base) for start, stop in ranges),
        (0, span[1] - base) if span is not None else None,
        tuple((start - base, stop - base) for start, stop in dropped) if dropped is not None else None,
    )
    return Run(shape, whole(line["step"]), whole(line["epoch"]), base)


def _edges(told: Any) -> tuple[int, int]:
    """A range that a line names; whether it can be, its reader judges."""
    start, stop = told
    return _any_whole(start), _any_whole(stop)


def _any_whole(told: Any) -> int:
    return whole(told, least=-MOST_WHOLE)


def runs_in(line: Line) -> Iterator[Run]:
    """Yield the runs that a line holds, of a ledger or of its sealed file; raises errors as `run_of` does."""
    if "runs" not in line:
        yield _read_run(line)
        return
    runs = [_read_run(one) for one in line["runs"]]
    if not runs:
        raise ValueError("it lists no runs")
    if "order" in line:
        yield from _mixed_runs(runs, line)
        return
    times, steps, epochs, positions = map(_any_whole, line["more"])
    _refuse_too_many((times + 1) * sum(run.num for run in runs))
    for run in runs:
        _checked(run.moved(times * steps, times * epochs, times * positions))
    for index in range(times + 1):
        for run in runs:
            yield run.moved(index * steps, index * epochs, index * positions)


def _read_run(line: Line) -> Run:
    run = run_of(line)
    if "more" not in line:
        return run
    more, stride, shift = map(_any_whole, line["more"])
    if more < 1 or stride < 1:
        raise ValueError(f"more is {line['more']}")
    _refuse_too_many(more + 1)
    return _checked(run._replace(num=more + 1, stride=stride, shift=shift))


def _refuse_too_many(num: int) -> None:
    if not 0 < num <= MOST_LINES:
        raise ValueError(f"it stands for {num} lines, and one stands for {MOST_LINES} at most")


def _checked(run: Run) -> Run:
    """A run whose last line, too, has numbers that a line may have."""
    last = run.part(run.num - 1, run.num)
    whole(last.step)
    whole(last.epoch)
    _any_whole(last.base)
    return run


def join_runs(runs: Iterable[Run]) -> list[Run]:
    """Join the runs of each stream that follow each other."""
    joined: list[Run] = []
    newest: dict[str, int] = {}  # by stream, where its last run stands
    for run in runs:
        place = newest.get(run.shape.stream)
        longer = _longer(joined[place], run) if place is not None else None
        if longer is not None and place is not None:
            joined[place] = longer
        else:
            newest[run.shape.stream] = len(joined)
            joined.append(run)
    return joined


def _longer(run: Run, more: Run) -> Run | None:
    """A run with another one at its end; None where that does not follow it."""
    if run.shape != more.shape or run.epoch != more.epoch:
        return None
    stride = run.stride if run.num > 1 else more.step - run.step
    shift = run.shift if run.num > 1 else more.base - run.base
    if stride < 1 or more.step != run.step + run.num * stride or more.base != run.base + run.num * shift:
        return None
    if more.num > 1 and (more.stride, more.shift) != (stride, shift):
        return None
    return run._replace(num=run.num + more.num, stride=stride, shift=shift)


def merge_ledger(lines: Sequence[str]) -> list[str]:
    """Return what is kept of a ledger's lines: runs, cycles and mixtures of the steps, all others as they are."""
    merged: list[str] = []
    runs: list[Run] = []
    for text in lines:
        run = _exact_run(text)
        if run is not None and len(runs) < MOST_LINES:
            runs.append(run)
            continue
        merged += _shortest_text(join_runs(runs))
        runs.clear()
        if run is not None:
            runs.append(run)
        else:
            merged.append(text)
    return [*merged, *_shortest_text(join_runs(runs))]


def _exact_run(text: str) -> Run | None:
    """The run of a line that can be written again from it; None for other lines."""
    try:
        line = read_object(text)
        if "step" not in line or not line.keys() <= KEYS:
            return None
        run = run_of(line)
        return run if run.line() == line else None
    except (ValueError, TypeError, KeyError, IndexError):
        return None


def _shortest_text(runs: list[Run]) -> Iterator[str]:
    """The lines of runs: long cycles, and what lies between them as a mixture where that is shorter."""
    begin = place = 0
    while place < len(runs):
        length, times = _cycle(runs, place)
        if (times - 1) * length < LEAST_SAVED:
            place += 1
            continue
        yield from _irregular_text(runs[begin:place])
        yield _cycle_text(runs, place, length, times)
        begin = place = place + length * times
    yield from _irregular_text(runs[begin:])


def _irregular_text(runs: list[Run]) -> list[str]:
    plain = list(_cycles_text(runs))
    if len(runs) < LEAST_MIXED:
        return plain
    mixed = _mixture_text(runs)
    return [mixed] if len(mixed) < sum(map(len, plain)) else plain


def _cycles_text(runs: list[Run]) -> Iterator[str]:
    place = 0
    while place < len(runs):
        length, times = _cycle(runs, place)
        if times == 1:
            yield from (json.dumps(_run_line(run)) for run in runs[place : place + length])
        else:
            yield _cycle_text(runs, place, length, times)
        place += length * times


def _cycle_text(runs: list[Run], place: int, length: int, times: int) -> str:
    kept = [_run_line(run) for run in runs[place : place + length]]
    return json.dumps({"runs": kept, "more": [times - 1, *_distance(runs[place], runs[place + length])]})


def _mixture_text(runs: list[Run]) -> str:
    kinds: dict[Kind, int] = {}
    listed: list[Run] = []
    distances: dict[tuple[int, int, int, int], int] = {}
    order: list[int] = []
    ends = _Ends(runs[0])
    for run in runs:
        kind = (run.shape, run.num, run.stride, run.shift)
        if kind not in kinds:
            kinds[kind] = len(listed)
            listed.append(run)
            ends.list(run)
        distance = (kinds[kind], *ends.distance(run))
        order.append(distances.setdefault(distance, len(distances)))
        ends.follow(run)
    return json.dumps({"runs": list(map(_run_line, listed)), "next": list(map(list, distances)), "order": order})


def _mixed_runs(listed: Sequence[Run], line: Line) -> Iterator[Run]:
    """The runs of a mixture, in order."""
    ends = _Ends(listed[0])
    for run in listed:
        ends.list(run)
    following = [_distances(one, len(listed)) for one in line["next"]]
    order = [whole(place, most=len(following) - 1) for place in line["order"]]
    _refuse_too_many(sum(listed[following[place][0]].num for place in order))
    mixed: list[Run] = []
    for place in order:
        kind, *distance = following[place]
        mixed.append(_checked(ends.run_at(listed[kind], *distance)))
        ends.follow(mixed[-1])
    yield from mixed


def _distances(told: Any, num_kinds: int) -> tuple[int, int, int, int]:
    kind, steps, epochs, positions = told
    return whole(kind, most=num_kinds - 1), _any_whole(steps), _any_whole(epochs), _any_whole(positions)


class _Ends:
    """Where the last run has ended, and the last one of each stream."""

    def __init__(self, first: Run) -> None:
        self._step = first.step
        self._places: dict[str, tuple[int, int]] = {}  # epoch and position

    def list(self, run: Run) -> None:
        """A kind of run is listed: the first one of its stream says where that stream begins."""
        self._places.setdefault(run.shape.stream, (run.epoch, run.base))

    def distance(self, run: Run) -> tuple[int, int, int]:
        epoch, position = self._places[run.shape.stream]
        return run.step - self._step, run.epoch - epoch, run.base - position

    def run_at(self, kind: Run, steps: int, epochs: int, positions: int) -> Run:
        epoch, position = self._places[kind.shape.stream]
        return kind._replace(step=self._step + steps, epoch=epoch + epochs, base=position + positions)

    def follow(self, run: Run) -> None:
        self._step = run.last_step
        self._places[run.shape.stream] = run.epoch, run.base + (run.num - 1) * run.shift


def _cycle(runs: list[Run], place: int) -> tuple[int, int]:
    """Return how many runs from here on repeat themselves, and how often, where most are saved."""
    best = (1, 1)
    for length in range(1, min(LONGEST, len(runs) - place - 1) + 1):
        distance = _distance(runs[place], runs[place + length])
        end = place
        while end + length < len(runs) and _repeats(runs[end], runs[end + length], distance):
            end += 1
        times = 1 + (end - place) // length
        if (times - 1) * length > (best[1] - 1) * best[0]:
            best = (length, times)
    return best


def _repeats(run: Run, later: Run, distance: tuple[int, int, int]) -> bool:
    same = (run.shape, run.num, run.stride, run.shift) == (later.shape, later.num, later.stride, later.shift)
    return same and _distance(run, later) == distance


def _distance(run: Run, later: Run) -> tuple[int, int, int]:
    return later.step - run.step, later.epoch - run.epoch, later.base - run.base


def _run_line(run: Run) -> Line:
    return run.line() if run.num == 1 else {**run.line(), "more": [run.num - 1, run.stride, run.shift]}
