"""Reads all ledgers of a run into columns: which steps count, and which positions each of them used.

A run that continued from a checkpoint took some steps again. Each attempt records from which step of which attempt it
went on. Going back from the newest attempt gives the steps that led to the present state. All other steps are void:
their samples count as never used. A run may also begin with another run's checkpoint; then the starting positions of
its streams say what was used before.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.monitor.records.attempt_history import ResumePoint, lineage, parse_ledger_line, resume_point_of
from paceline.monitor.records.run_files import local_path, worker_number

__all__ = ["AttemptLedger", "EpochColumns", "Rollback", "RunLedgers", "StalenessSeen", "StreamHeader"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamHeader:
    """What a worker said when it opened a stream."""

    samples: int | None  # None: an iterable, whose length is unknown
    batch: int
    seed: int
    shuffle: bool
    drop_last: bool
    weights: str = ""  # a checksum of the weights by which samples are drawn; "": each comes once
    staleness: int | None = None  # by how many others an update may be behind; None: there is no bound


@dataclasses.dataclass(kw_only=True, slots=True)
class StalenessSeen:
    """How far the updates of a stream were behind, where replicas take turns, as their workers have noted it."""

    bounds: set[int | None] = dataclasses.field(default_factory=set["int | None"])  # of all attempts
    most: int = 0
    beyond: list[tuple[int, int, int]] = dataclasses.field(default_factory=list["tuple[int, int, int]"])
    """Step, how far it was behind, and its bound: those that should not be."""


@dataclasses.dataclass(kw_only=True, slots=True)
class ElasticStep:
    """A step of an elastic run: every member that committed it noted all of its positions."""

    epoch: int
    start: int
    stop: int
    skipped: bool
    num_dropped: int = 0  # positions that came too late for it
    num_told: int = 0  # positions that members say they ran


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
    steps: dict[str, dict[int, array[int]]] = dataclasses.field(default_factory=dict[str, "dict[int, array[int]]"])
    wholes: dict[tuple[str, int], ElasticStep] = dataclasses.field(default_factory=dict[tuple[str, int], "ElasticStep"])
    rollbacks: dict[int, Rollback] = dataclasses.field(default_factory=dict[int, Rollback])  # by from_step
    void_steps: array[int] = dataclasses.field(default_factory=lambda: array("q"))


@dataclasses.dataclass(kw_only=True, slots=True)
class EpochColumns:
    """The position ranges that the valid steps of one epoch used: row i is [starts[i], stops[i])."""

    begins_at: int = 0  # the positions before it were used by another run
    # Distinct ones, by their last appearance.
    streams: list[StreamHeader] = dataclasses.field(default_factory=list["StreamHeader"])
    starts: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    stops: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    steps: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    workers: array[int] = dataclasses.field(default_factory=lambda: array("q"))
    seen_steps: array[int] = dataclasses.field(default_factory=lambda: array("q"))  # with repetitions
    skipped_steps: set[int] = dataclasses.field(default_factory=set[int])
    num_dropped: int = 0  # positions whose gradients came too late for their steps


class RunLedgers:
    """Everything the ledgers below `run_dir` hold; `problems` lists what could not be read or contradicts itself."""

    def __init__(self, run_dir: Path) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []
        self.epochs: dict[tuple[str, int], EpochColumns] = {}
        self.lags: dict[str, StalenessSeen] = {}  # by stream
        self._paths: dict[tuple[int, int], Path] = {}
        self.attempts = self._find_attempts(run_dir)
        self.begun_elsewhere = self._find_line()
        starts = self.begun_elsewhere.starts if self.begun_elsewhere else ()
        self._starts = {(stream, epoch): position for stream, epoch, position in starts}
        for attempt in self.attempts:
            for worker in attempt.workers:
                self._read(attempt, worker)

    def _find_attempts(self, run_dir: Path) -> list[AttemptLedger]:
        found: list[AttemptLedger] = []
        for directory in run_dir.glob("attempt_*"):
            number = directory.name.removeprefix("attempt_")
            if not number.isdigit():
                continue
            places = {worker_number(place.name): place / "ledger.jsonl" for place in directory.iterdir()}
            paths = {worker: path for worker, path in places.items() if worker is not None}
            starts = {worker: start for worker, path in paths.items() if (start := resume_point_of(path)) is not None}
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

    def _read(self, attempt: AttemptLedger, worker: int) -> None:
        streams: dict[str, StreamHeader] = {}
        has_stepped = False
        for where, line in self._lines(self._paths[attempt.number, worker]):
            try:
                if "step" in line:
                    has_stepped = True
                    self._take_step(attempt, worker, line, streams)
                elif "rollback" in line:
                    self._take_rollback(attempt, line["rollback"])
                elif "joins" in line:
                    pass  # a worker that came later; what it took over was another worker's
                elif "stream" in line:
                    streams[line["stream"]] = _stream(line)
                elif line.get("attempt") != attempt.number:
                    self.problems.append(f"{where} belongs to attempt {line.get('attempt')}, not {attempt.number}")
                elif has_stepped:
                    self.problems.append(f"{where} begins the attempt anew after steps were taken in it")
            except (KeyError, TypeError, ValueError) as error:
                self.problems.append(f"{where} does not say what a ledger says ({type(error).__name__}: {error})")

    def _take_step(
        self, attempt: AttemptLedger, worker: int, line: dict[str, Any], streams: dict[str, StreamHeader]
    ) -> None:
        step, name, epoch = int(line["step"]), str(line["stream"]), int(line["epoch"])
        if step > attempt.until_step:
            attempt.void_steps.append(step)
            return
        ranges = [(int(start), int(stop)) for start, stop in line["ranges"]]
        if step <= attempt.begun.from_step or any(not 0 <= start <= stop for start, stop in ranges):
            raise ValueError(
                f"step {step} with ranges {ranges} cannot be, in an attempt from step {attempt.begun.from_step}"
            )
        stream = streams[name]
        if "behind" in line:
            self._take_lag(name, step, behind=int(line["behind"]), bound=stream.staleness)
        if "whole" in line:
            known = self._take_whole(attempt, line, ranges)
            if known:
                return
            ranges = [(int(line["whole"][0]), int(line["whole"][1]))]
        else:
            attempt.steps.setdefault(name, {}).setdefault(worker, array("q")).append(step)
        if (name, epoch) not in self.epochs:
            self.epochs[name, epoch] = EpochColumns(begins_at=self._starts.get((name, epoch), 0))
        columns = self.epochs[name, epoch]
        if columns.streams[-1:] != [stream]:  # a batch size may come back
            columns.streams[:] = [*(one for one in columns.streams if one != stream), stream]
        columns.seen_steps.append(step)
        if line["skipped"]:
            columns.skipped_steps.add(step)
        columns.num_dropped += _num_dropped(line)
        for start, stop in ranges:
            columns.starts.append(start)
            columns.stops.append(stop)
            columns.steps.append(step)
            columns.workers.append(worker)

    def _take_lag(self, name: str, step: int, *, behind: int, bound: int | None) -> None:
        if behind < 0:
            raise ValueError(f"the update of step {step} cannot be {behind} behind")
        lag = self.lags.setdefault(name, StalenessSeen())
        lag.bounds.add(bound)
        lag.most = max(lag.most, behind)
        if bound is not None and behind > bound:
            lag.beyond.append((step, behind, bound))

    def _take_rollback(self, attempt: AttemptLedger, told: dict[str, Any]) -> None:
        skips = tuple(
            (str(name), (int(begin[0]), int(begin[1])), (int(end[0]), int(end[1])))
            for name, (begin, end) in sorted(told["skips"].items())
        )
        rollback = Rollback(to_step=int(told["to_step"]), from_step=int(told["from_step"]), skips=skips)
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

    def _take_whole(self, attempt: AttemptLedger, line: dict[str, Any], ranges: list[tuple[int, int]]) -> bool:
        """Compare what a member of an elastic run says of a step with what others said; True: it is known already."""
        key = str(line["stream"]), int(line["step"])
        start, stop = map(int, line["whole"])
        told = ElasticStep(
            epoch=int(line["epoch"]),
            start=start,
            stop=stop,
            skipped=bool(line["skipped"]),
            num_dropped=_num_dropped(line),
        )
        whole = attempt.wholes.setdefault(key, told)
        whole.num_told += sum(last - first for first, last in ranges)
        same = dataclasses.replace(told, num_told=0) == dataclasses.replace(whole, num_told=0)
        if not same or any(not start <= first <= last <= stop for first, last in ranges):
            self.problems.append(f"attempt {attempt.number}: its workers disagree on step {key[1]} of stream {key[0]}")
        elif whole.num_told + whole.num_dropped > stop - start:
            self.problems.append(f"attempt {attempt.number}: some samples of step {key[1]} were run by two workers")
        return whole is not told

    def _lines(self, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """The lines of a ledger; a damaged one is a problem, unless it is the last: a kill can cut that one off."""
        damaged: str | None = None
        with open(path, encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, start=1):
                where, line = f"{local_path(path)}, line {number}", parse_ledger_line(text)
                if damaged and line is not None and "joins" in line:
                    self.notes.append(f"{damaged} was cut off when its worker was lost, and is ignored")
                elif damaged:
                    self.problems.append(f"{damaged} is damaged: what it said is lost")
                damaged = None
                if line is None:
                    damaged = where
                else:
                    yield where, line
        if damaged:
            self.notes.append(
                f"{damaged}, the last, was cut off and is ignored: its step was not committed by this worker"
            )


def _joins(path: Path) -> bool:
    """Whether a ledger is that of a worker that joined an attempt under way."""
    if not path.exists():
        return False
    with open(path, encoding="utf-8", errors="replace") as file:
        line = parse_ledger_line(file.readline())
    return line is not None and "joins" in line


def _num_dropped(line: dict[str, Any]) -> int:
    """How many positions of a step came too late for it."""
    return sum(int(stop) - int(start) for start, stop in line.get("dropped", ()))


def _stream(line: dict[str, Any]) -> StreamHeader:
    samples = line["samples"]
    return StreamHeader(
        samples=int(samples or 0) or None,
        batch=int(line["batch"]),
        seed=int(line["seed"]),
        shuffle=bool(line["shuffle"]),
        drop_last=bool(line["drop_last"]),
        weights=str(line.get("weights", "")),
        staleness=None if line.get("staleness") is None else int(line["staleness"]),
    )
