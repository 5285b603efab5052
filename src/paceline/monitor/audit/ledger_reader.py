"""Reads all ledgers of a run into columns: which steps count, and which positions each of them used.

A run that continued from a checkpoint took some steps again. Each attempt records from which step of which attempt it
went on. Going back from the newest attempt gives the steps that led to the present state. All other steps are void:
their samples count as never used. A run may also begin with another run's checkpoint; then the starting positions of
its streams say what was used before.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paceline.logs.ledger_runs import Run, Shape, join_runs, runs_in
from paceline.logs.log_reader import Unreadable, lines_of
from paceline.logs.sealed_log import sealed_path
from paceline.monitor.audit.drawn_shares import DrawnShares, read_drawn
from paceline.monitor.audit.epoch_columns import EpochColumns, StreamHeader, block_of
from paceline.monitor.audit.settled_steps import settled_step
from paceline.monitor.audit.step_alignment import ToldRuns, aligned
from paceline.monitor.records.attempt_history import ResumePoint, lineage, parse_ledger_line, resume_point_of
from paceline.monitor.records.run_files import local_path, worker_number
from paceline.plain_data import MOST_WHOLE, shown, text_of, whole

__all__ = ["MOST_LISTED", "AttemptLedger", "PartialSteps", "Rollback", "RunLedgers", "StalenessSeen"]

MOST_LISTED = 20  # steps, and ranges of an epoch, of one kind of problem
MOST_WAITING = 10_000  # runs that are joined at once

Told = tuple[int, Run]  # a worker, and what it said


@dataclasses.dataclass(kw_only=True, slots=True)
class StalenessSeen:
    """How far the updates of a stream were behind, where replicas take turns, as their workers have noted it."""

    bounds: set[int | None] = dataclasses.field(default_factory=set["int | None"])  # of all attempts
    most: int = 0
    beyond: list[tuple[int, int, int]] = dataclasses.field(default_factory=list["tuple[int, int, int]"])
    """Step, how far it was behind, and its bound: the first of those that should not be."""
    num_beyond: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartialSteps:
    """Steps that only some workers have in their ledgers."""

    run: Run
    having: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rollback:
    """After `from_step` the weights became those of `to_step` again: the steps between are undone, their samples are
    not used again."""

    to_step: int
    from_step: int
    skips: tuple[tuple[str, tuple[int, int], tuple[int, int]], ...]  # stream, and the (epoch, position) of both steps


@dataclasses.dataclass(kw_only=True, slots=True)
class AttemptLedger:
    """What the ledgers of one attempt say of its steps."""

    number: int
    workers: tuple[int, ...]  # with a ledger
    silent: tuple[int, ...]  # with a directory but without a ledger that can be read
    begun: ResumePoint
    until_step: float = 0  # later steps are void; until it is found in the line, all are
    told: dict[tuple[str, bool], ToldRuns] = dataclasses.field(default_factory=dict[tuple[str, bool], ToldRuns])
    """By stream, and whether each line has the whole step's positions."""
    partial: dict[str, list[PartialSteps]] = dataclasses.field(default_factory=dict[str, "list[PartialSteps]"])
    has_steps: bool = False  # that are valid, and of which each worker notes its own part
    has_wholes: bool = False  # an elastic run: every member that committed a step noted all of its positions
    rollbacks: dict[int, Rollback] = dataclasses.field(default_factory=dict[int, Rollback])  # by from_step
    void_steps: tuple[int, int] | None = None  # the first and the last
    is_under_way: bool = False  # the run goes on: later steps than `until_step` are not in all ledgers yet


class RunLedgers:
    """Everything the ledgers below `run_dir` hold; `problems` lists what could not be read or contradicts itself."""

    def __init__(self, run_dir: Path, *, under_way: int | None = None) -> None:
        """`under_way`: the attempt at which the run is at work while it is read."""
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.epochs: dict[tuple[str, int], EpochColumns] = {}
        self.lags: dict[str, StalenessSeen] = {}  # by stream
        self.drawn: dict[str, DrawnShares] = {}  # by stream, where it is a mixture
        self._headers: dict[StreamHeader, StreamHeader] = {}  # each once: workers say the same of a stream
        self._paths: dict[tuple[int, int], Path] = {}
        self.attempts = self._find_attempts(run_dir)
        self.begun_elsewhere = self._find_line()
        for attempt in self.attempts:
            if attempt.number == under_way:
                self._settle(attempt)
        starts = self.begun_elsewhere.starts if self.begun_elsewhere else ()
        self._starts = {(stream, epoch): position for stream, epoch, position in starts}
        for attempt in self.attempts:
            for worker in attempt.workers:
                self._read(attempt, worker)
        cuts = {
            step + 1
            for attempt in self.attempts
            for one in attempt.rollbacks.values()
            for step in (one.to_step, one.from_step)
        }
        for attempt in self.attempts:
            for stream in sorted({name for name, _ in attempt.told}):
                self._join_parts(attempt, stream, cuts)
                self._join_wholes(attempt, stream, cuts)

    def _find_attempts(self, run_dir: Path) -> list[AttemptLedger]:
        found: list[AttemptLedger] = []
        for directory in run_dir.glob("attempt_*"):
            number = directory.name.removeprefix("attempt_")
            if not number.isdecimal() or len(number) > 9 or not os.path.isdir(directory):
                continue
            try:
                places = {worker_number(name): directory / name / "ledger.jsonl" for name in os.listdir(directory)}
            except OSError as error:
                self.problems.append(f"{local_path(directory)}: {Unreadable.because(error)}")
                continue
            paths = {worker: path for worker, path in places.items() if worker is not None}
            starts = {worker: start for worker, path in paths.items() if (start := resume_point_of(path)) is not None}
            self.problems += _unreadable(path for worker, path in paths.items() if worker not in starts)
            if not starts:  # it ended before any worker could take a step
                continue
            if len(set(starts.values())) > 1:
                told = {worker: start.from_step for worker, start in starts.items()}
                self.problems.append(f"attempt {number}: its workers disagree on what they went on from: {told}")
            self._paths.update({(int(number), worker): paths[worker] for worker in starts})
            joined = {worker for worker, path in paths.items() if worker not in starts and _joins(path)}
            self._paths.update({(int(number), worker): paths[worker] for worker in joined})
            silent = tuple(sorted(paths.keys() - starts.keys() - joined))
            workers = tuple(sorted({*starts, *joined}))
            begun = min(starts.values(), key=lambda start: start.from_step)
            found.append(AttemptLedger(number=int(number), workers=workers, silent=silent, begun=begun))
        return sorted(found, key=lambda attempt: attempt.number)

    def _find_line(self) -> ResumePoint | None:
        """Go back from the newest attempt to what it went on from, and so on; the others lead nowhere. Returns the
        beginning of the line, where that is another run's checkpoint."""
        by_number = {attempt.number: attempt for attempt in self.attempts}
        last: AttemptLedger | None = None
        newest, begun = max(by_number, default=0), {number: attempt.begun for number, attempt in by_number.items()}
        for stretch in lineage(newest, begun) if begun else ():
            if last is not None and stretch.attempt not in by_number:
                self.problems.append(
                    f"attempt {last.number} went on from step {last.begun.from_step} of attempt {stretch.attempt}, "
                    "which left no ledger"
                )
                return None
            last = by_number[stretch.attempt]
            last.until_step = stretch.until
        return last.begun if last is not None and last.begun.source is not None else None

    def _settle(self, attempt: AttemptLedger) -> None:
        """Look how far all workers of an attempt under way have come: what is read later, has these steps at least."""
        attempt.is_under_way = True
        ledgers = [self._paths[attempt.number, worker] for worker in attempt.workers]
        settled = settled_step(ledgers, from_step=attempt.begun.from_step)
        attempt.until_step = min(attempt.until_step, attempt.begun.from_step if attempt.silent else settled)

    def _read(self, attempt: AttemptLedger, worker: int) -> None:
        streams: dict[str, StreamHeader] = {}
        waiting: list[Run] = []  # steps since the last other line
        has_stepped = False
        for where, line in self._lines(self._paths[attempt.number, worker], is_growing=attempt.is_under_way):
            try:
                if "step" in line or "runs" in line:
                    has_stepped = True
                    for run in self._known(where, runs_in(line), streams):
                        waiting.append(run)
                        if len(waiting) > MOST_WAITING:
                            self._take_runs(attempt, worker, waiting, streams)
                    continue
                self._take_runs(attempt, worker, waiting, streams)
                if "rollback" in line:
                    self._take_rollback(attempt, line["rollback"])
                elif "drawn" in line:
                    self._take_drawn(attempt, *read_drawn(line))
                elif "joins" in line:
                    pass  # a worker that came later; what it took over was another worker's
                elif "stream" in line:
                    header = _stream(line)
                    streams[text_of(line["stream"])] = self._headers.setdefault(header, header)
                elif line.get("attempt") != attempt.number:
                    self.problems.append(f"{where} belongs to attempt {line.get('attempt')}, not {attempt.number}")
                elif has_stepped:
                    self.problems.append(f"{where} begins the attempt anew after steps were taken in it")
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                self._not_said(where, error)
        self._take_runs(attempt, worker, waiting, streams)

    def _take_drawn(self, attempt: AttemptLedger, stream: str, drawn: DrawnShares) -> None:
        """Keep the newest; attempts are read in order, and counts go on from those of the one before."""
        newest = self.drawn.get(stream)
        is_valid = drawn.until_step <= attempt.until_step
        if is_valid and (newest is None or drawn.until_step >= newest.until_step):
            self.drawn[stream] = drawn

    def _known(self, where: str, runs: Iterator[Run], streams: dict[str, StreamHeader]) -> Iterator[Run]:
        """Those of a stream that was opened."""
        unknown: set[str] = set()
        for run in runs:
            if run.shape.stream in streams:
                yield run
            elif run.shape.stream not in unknown:
                unknown.add(run.shape.stream)
                self._not_said(where, KeyError(run.shape.stream))

    def _not_said(self, where: str, error: Exception) -> None:
        self.problems.append(f"{where} does not say what a ledger says ({type(error).__name__}: {error})")

    def _take_runs(
        self, attempt: AttemptLedger, worker: int, waiting: list[Run], streams: dict[str, StreamHeader]
    ) -> None:
        for run in join_runs(waiting):
            self._take_run(attempt, worker, run, streams[run.shape.stream])
        waiting.clear()

    def _take_run(self, attempt: AttemptLedger, worker: int, run: Run, stream: StreamHeader) -> None:
        valid = run.num if run.last_step <= attempt.until_step else run.before(int(attempt.until_step) + 1)
        if valid < run.num:
            void = run.part(valid, run.num)
            first, last = attempt.void_steps or (void.step, void.last_step)
            attempt.void_steps = min(first, void.step), max(last, void.last_step)
            if not valid:
                return
            run = run.part(0, valid)
        begin, end = _possible(run, attempt.begun.from_step)
        if (begin, end) != (0, run.num):
            first = run.part(end if begin == 0 else 0, (end if begin == 0 else 0) + 1)
            wrong = _impossible(first, attempt.begun.from_step)
            more = run.num - (end - begin) - 1
            wrong += f", and so are {more} more of its line" if more else ""
            self._not_said(local_path(self._paths[attempt.number, worker]), ValueError(wrong))
            if begin == end:
                return
            run = run.part(begin, end)
        name = run.shape.stream
        if run.shape.behind is not None:
            self._take_lag(name, run, bound=stream.staleness)
        columns = self.epochs.get((name, run.epoch))
        if columns is None:
            columns = self.epochs[name, run.epoch] = EpochColumns(begins_at=self._starts.get((name, run.epoch), 0))
        columns.note(stream, run)
        told = attempt.told.get((name, run.shape.whole is not None))
        if told is None:
            told = attempt.told[name, run.shape.whole is not None] = ToldRuns()
        told.add(worker, run)

    def _join_parts(self, attempt: AttemptLedger, stream: str, cuts: set[int]) -> None:
        """Judge what the workers of an attempt say of the same steps, each of its own part, and add it to the
        epochs."""
        told = attempt.told.pop((stream, False), ToldRuns())
        attempt.has_steps = attempt.has_steps or bool(len(told))
        for group in aligned(told, cuts=cuts):
            having = tuple(sorted({worker for worker, _ in group}))
            if len(having) < len(attempt.workers):
                attempt.partial.setdefault(stream, []).append(PartialSteps(run=group[0][1], having=having))
            block = block_of(group)
            if block is not None:
                used = next(run for _, run in group if run.shape.ranges)
                self.epochs[stream, used.epoch].add_block(block)
            for worker, run in group:
                columns = self.epochs[stream, run.epoch]
                columns.note_outcome(run)
                if block is None:
                    columns.add_ranges(run, worker, run.shape.ranges)

    def _join_wholes(self, attempt: AttemptLedger, stream: str, cuts: set[int]) -> None:
        """The same of steps whose positions each worker has noted as a whole."""
        told = attempt.told.pop((stream, True), ToldRuns())
        attempt.has_wholes = attempt.has_wholes or bool(len(told))
        for group in aligned(told, cuts=cuts):
            self._compare(attempt, group)
            worker, run = group[0]
            columns = self.epochs[stream, run.epoch]
            columns.note_outcome(run)
            ranges = (run.shape.whole or (0, 0),)
            if run.num > 1:
                block = block_of([(worker, run._replace(shape=run.shape._replace(ranges=ranges)))])
                if block is not None:
                    columns.add_block(block)
                    continue
            columns.add_ranges(run, worker, ranges)

    def _compare(self, attempt: AttemptLedger, group: list[Told]) -> None:
        """Compare what members of an elastic run say of whole steps: all alike, and of their own parts no more."""
        told = group[0][1]
        start, stop = told.shape.whole or (0, 0)
        num_told, num_dropped = 0, _num_dropped(told)
        for _, run in group:
            num_told += sum(last - first for first, last in run.shape.ranges)
            same = (run.epoch, run.base, run.shift, run.shape.whole, run.shape.skipped) == (
                (told.epoch, told.base, told.shift, told.shape.whole, told.shape.skipped)
            )
            within = all(start <= first <= last <= stop for first, last in run.shape.ranges)
            if not (same and within and _num_dropped(run) == num_dropped):
                self._say_of_each(
                    told, f"attempt {attempt.number}: its workers disagree on step {{}} of stream {told.shape.stream}"
                )
            elif num_told + num_dropped > stop - start:
                self._say_of_each(told, f"attempt {attempt.number}: some samples of step {{}} were run by two workers")

    def _say_of_each(self, run: Run, text: str) -> None:
        steps = range(run.step, run.last_step + 1, run.stride)
        self.problems += [text.format(step) for step in steps[:MOST_LISTED]]
        if len(steps) > MOST_LISTED:
            self.problems.append(text.format(f"{steps[MOST_LISTED]} and of {len(steps) - MOST_LISTED - 1} more"))

    def _take_lag(self, name: str, run: Run, *, bound: int | None) -> None:
        behind = run.shape.behind or 0
        lag = self.lags.setdefault(name, StalenessSeen())
        lag.bounds.add(bound)
        lag.most = max(lag.most, behind)
        if bound is not None and behind > bound:
            steps = range(run.step, run.last_step + 1, run.stride)
            lag.beyond += [(step, behind, bound) for step in steps[: MOST_LISTED - len(lag.beyond)]]
            lag.num_beyond += len(steps)

    def _take_rollback(self, attempt: AttemptLedger, told: dict[str, Any]) -> None:
        skips = tuple((name, _place(begin), _place(end)) for name, (begin, end) in sorted(told["skips"].items()))
        rollback = Rollback(to_step=whole(told["to_step"]), from_step=whole(told["from_step"]), skips=skips)
        if rollback.from_step > attempt.until_step:  # a later attempt went on from before it: its steps are void
            return
        if not attempt.begun.from_step <= rollback.to_step < rollback.from_step:
            raise ValueError(
                f"a rollback from step {rollback.from_step} to step {rollback.to_step} cannot be, in an attempt from "
                f"step {attempt.begun.from_step}"
            )
        if attempt.rollbacks.setdefault(rollback.from_step, rollback) != rollback:
            self.problems.append(
                f"attempt {attempt.number}: its workers disagree on the rollback after step {rollback.from_step}"
            )

    def _lines(self, path: Path, *, is_growing: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        """The lines of a ledger; a damaged one is a problem, unless it is the last: a kill can cut that one off, and
        one that is being written `is_growing`."""
        damaged: str | None = None
        name, sealed = local_path(path), sealed_path(path)
        sealed_too = f" (with those of {sealed.name})" if os.path.exists(sealed) else ""
        for number, text in enumerate(lines_of(path), start=1):
            if isinstance(text, Unreadable):
                self.problems.append(f"{name}: {text}")
                continue
            line = parse_ledger_line(text)
            where = f"{name}, line {number}{sealed_too}"
            if damaged and line is not None and "joins" in line:
                self.notes.append(f"{damaged} was cut off when its worker was lost, and is ignored")
            elif damaged:
                self.problems.append(f"{damaged} is damaged: what it said is lost")
            damaged = None
            if line is None:
                damaged = where
            else:
                yield where, line
        if damaged and not is_growing:
            self.notes.append(
                f"{damaged}, the last, was cut off and is ignored: its step was not committed by this worker"
            )


def _unreadable(ledgers: Iterable[Path]) -> list[str]:
    """One sentence for each ledger that cannot be read at all."""
    firsts = ((path, next(iter(lines_of(path)), "")) for path in ledgers)
    return [f"{local_path(path)}: {first}" for path, first in sorted(firsts) if isinstance(first, Unreadable)]


def _joins(path: Path) -> bool:
    """Whether a ledger is that of a worker that joined an attempt under way."""
    line = parse_ledger_line(next(iter(lines_of(path)), ""))
    return line is not None and "joins" in line


def _impossible(run: Run, from_step: int) -> str:
    """What of a run of one line that cannot be is wrong, in an attempt from a step."""
    if (run.shape.behind or 0) < 0:
        return f"the update of step {run.step} cannot be {run.shape.behind} behind"
    ranges = [(run.base + start, run.base + stop) for start, stop in run.shape.ranges]
    return f"step {run.step} with ranges {shown(ranges)} cannot be, in an attempt from step {from_step}"


def _possible(run: Run, from_step: int) -> tuple[int, int]:
    """Which of its lines can be, in an attempt from a step: they follow each other, from the first to before the
    second number."""
    least = _least_position(run.shape)
    if least is None:
        return 0, 0
    lowest = run.base + least
    if run.step > from_step and lowest >= 0 and run.shift >= 0:
        return 0, run.num
    begin, end = run.before(from_step + 1), run.num
    if not run.shape.ranges:
        pass
    elif run.shift > 0:
        begin = max(begin, -(lowest // run.shift))
    elif run.shift < 0:
        end = min(end, lowest // -run.shift + 1)
    elif lowest < 0:
        end = 0
    return (begin, end) if begin < end else (0, 0)


@functools.lru_cache(maxsize=1024)
def _least_position(shape: Shape) -> int | None:
    """The least position, from the base on, of a shape's ranges (0: there is none); None where these cannot be."""
    if (shape.behind or 0) < 0 or any(start > stop for start, stop in shape.ranges):
        return None
    return min((start for start, _ in shape.ranges), default=0)


def _place(told: Any) -> tuple[int, int]:
    """An epoch, and a position of it."""
    epoch, position = told
    return whole(epoch), whole(position, least=-MOST_WHOLE)


def _num_dropped(run: Run) -> int:
    """How many positions of a step came too late for it."""
    return sum(stop - start for start, stop in run.shape.dropped or ())


def _order_name(line: dict[str, Any]) -> str:
    """What an order that is no shuffle goes by; "" for one that is."""
    weights = text_of(line.get("weights", ""))
    return f"weights {weights}" if weights else text_of(line.get("draws", ""))


def _stream(line: dict[str, Any]) -> StreamHeader:
    samples = line["samples"]
    return StreamHeader(
        samples=whole(samples or 0) or None,
        batch=whole(line["batch"], least=1),
        seed=whole(line["seed"], most=2**63 - 1),
        shuffle=bool(line["shuffle"]),
        drop_last=bool(line["drop_last"]),
        weights=_order_name(line),
        staleness=None if line.get("staleness") is None else whole(line["staleness"]),
    )
