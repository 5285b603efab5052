"""What is read of a long run whose old lines were sealed is what would be read of all its lines."""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_run_files import JOB, Workers, lose
from paceline.events import (
    Evaluated,
    Event,
    EventLog,
    EventsMerged,
    RunStarted,
    StateKept,
    StepDone,
    Warned,
    WorkerFinished,
    WorkerStarted,
)
from paceline.logs import event_summaries, metric_rows
from paceline.logs.event_summaries import merge_events
from paceline.logs.ledger_runs import merge_ledger
from paceline.logs.log_reader import lines_of
from paceline.logs.metric_rows import StepRanges
from paceline.logs.sealed_log import LineLog, Sealing, sealed_path
from paceline.monitor.audit.audit import AuditResult, audit
from paceline.monitor.export import metrics_jsonl
from paceline.monitor.export.metrics_jsonl import MetricsFile
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.records.steps import Step
from paceline.monitor.report.attempt_log import read_attempts
from paceline.monitor.report.curves import read_curves
from paceline.monitor.report.report import read_report
from paceline.monitor.status.status import status
from paceline.monitor.watch import Watch

Line = dict[str, Any]
WORKERS, BATCH, SAMPLES = 3, 12, 100  # nine steps an epoch, the last one of 4 samples
PER_EPOCH = 9


def ledger_lines(last: int, *, elastic: bool, rollback: int | None, turns: Sequence[int] = ()) -> dict[int, list[Line]]:
    """`turns`: which workers take a whole batch each, one after the other."""
    opening = {"stream": "train", "samples": SAMPLES, "batch": BATCH, "micro": 4, "seed": 3, "shuffle": True}
    head = [{"attempt": 1, "from_step": 0, "of_attempt": None}, {**opening, "drop_last": False}]
    told: dict[int, list[Line]] = {worker: list(head) for worker in range(WORKERS)}
    for step in range(1, last + 1):
        epoch, place = divmod(step - 1, PER_EPOCH)
        start, stop = place * BATCH, min((place + 1) * BATCH, SAMPLES)
        for worker in range(WORKERS):
            begin = start + 4 * worker
            line: Line = {"step": step, "stream": "train", "epoch": epoch}
            line |= {"ranges": [[begin, begin + 4]] if begin < stop else [], "skipped": step % 31 == 0}
            if turns:
                line |= {"ranges": [[start, stop]], "behind": worker}
            if not turns or turns[step % len(turns)] == worker:
                told[worker].append(line | ({"whole": [start, stop]} if elastic or turns else {}))
            if step == rollback and step % PER_EPOCH:
                begins = [epoch, (place - 2) * BATCH]
                undone = {"to_step": step - 3, "from_step": step, "skips": {"train": [begins, [epoch, stop]]}}
                told[worker].append({"rollback": undone})
    return told


def written(run: Path, told: dict[int, list[Line]], *, seals: Sequence[int]) -> Path:
    """Write ledgers; a worker's is sealed after these numbers of lines, each worker a little later."""
    for worker, lines in told.items():
        place = run / "attempt_1" / f"worker_{worker}"
        place.mkdir(parents=True)
        sealing = Sealing(merge=merge_ledger, cut=lambda lines: max(0, len(lines) - 4), over_bytes=1 << 30)
        log = LineLog(place / "ledger.jsonl", sealing=sealing)
        for number, line in enumerate(lines):
            log.write(json.dumps(line))
            if number - worker in seals:
                log.seal()
        log.close()
    return run


def facts(result: AuditResult) -> Any:
    problems = sorted(text.split(".jsonl", 1)[-1].split(")", 1)[-1] for text in result.problems)
    return result.verdict, problems, [dataclasses.asdict(epoch) for epoch in result.epochs]


def planted(lines: list[Line], kind: str, place: int) -> list[Line]:
    """One worker's lines with something wrong in the middle of them."""
    steps = [number for number, line in enumerate(lines) if line.get("ranges")]
    if not steps:  # others took all turns
        return lines
    number = steps[place % len(steps)]
    line = lines[number]
    (begin, end), after = line["ranges"][0], lines[number + 1 :]
    match kind:
        case "lost line":
            return [*lines[:number], *after]
        case "double line":
            return [*lines[: number + 1], *lines[number:]]
        case "lost samples":
            return [*lines[:number], {**line, "ranges": [[begin + 1, end]]}, *after]
        case "double samples":
            return [*lines[:number], {**line, "ranges": [[max(0, begin - 2), end]]}, *after]
        case "other epoch":
            return [*lines[:number], {**line, "epoch": line["epoch"] + 1}, *after]
        case _:
            return lines


KINDS = ["nothing", "lost line", "double line", "lost samples", "double samples", "other epoch"]


@given(
    kind=st.sampled_from(KINDS),
    last=st.integers(20, 80),
    place=st.integers(0, 200),
    worker=st.integers(0, WORKERS - 1),
    elastic=st.booleans(),
    rollback=st.one_of(st.none(), st.integers(6, 40)),
    seals=st.lists(st.integers(5, 70), max_size=4),
    turns=st.one_of(st.just(()), st.lists(st.integers(0, WORKERS - 1), min_size=5, max_size=30)),
    window=st.integers(1, 9),
)
@settings(max_examples=60, deadline=None)
@pytest.mark.thorough
def test_the_audit_of_sealed_ledgers_says_what_it_says_of_all_lines(
    tmp_path_factory: pytest.TempPathFactory,
    kind: str,
    last: int,
    place: int,
    worker: int,
    elastic: bool,
    rollback: int | None,
    seals: list[int],
    turns: Sequence[int],
    window: int,
) -> None:
    told = ledger_lines(last, elastic=elastic, rollback=rollback, turns=turns)
    told[worker] = planted(told[worker], kind, place)
    with pytest.MonkeyPatch.context() as patched:  # a long run has many windows
        patched.setattr("paceline.monitor.audit.step_alignment.WINDOW", window)
        sealed = audit(written(tmp_path_factory.mktemp("sealed"), told, seals=[*seals, 60]))
    plain = audit(written(tmp_path_factory.mktemp("plain"), told, seals=()))
    assert facts(sealed) == facts(plain)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_in_a_sealed_block_is_named_by_its_step(tmp_path: Path, kind: str) -> None:
    told = ledger_lines(70, elastic=False, rollback=None)
    told[1] = planted(told[1], kind, 30)  # the 31st line with samples: step 35, where the last of an epoch has none
    result = audit(written(tmp_path, told, seals=[69]))
    assert sealed_path(tmp_path / "attempt_1" / "worker_1" / "ledger.jsonl").exists()
    assert result.is_clean == (kind == "nothing")
    said = json.dumps([result.problems, [dataclasses.asdict(epoch) for epoch in result.epochs if epoch.says]])
    assert kind == "nothing" or "34" in said


def worker_events(steps: int, rng: random.Random) -> Iterator[Event]:
    yield WorkerStarted(
        rank=0, workers=2, host="a", pid=1, device="cpu", startup_s=2.0, plan="replicas=2", resumed_from_step=0
    )
    for step in range(1, steps + 1):
        seconds = {"data": 0.01, "compute": 0.6, "communication": 0.2 + rng.random() * 0.1, "optimizer": 0.05}
        skipped = rng.random() < 0.01
        yield StepDone(
            step=step, epoch=0, num_samples=8, loss=1 / step, metrics={"lr": 0.1}, seconds={**seconds, "total": 1.0},
            skipped=skipped,
        )  # fmt: skip
        if step % 100 == 0:
            yield StateKept(step=step, every=100, seconds=0.05, num_bytes=10)
        if step % 250 == 0:
            yield Evaluated(step=step, num_samples=8, metrics={}, duration_s=0.5)
    yield WorkerFinished(rank=0, step=steps, peak_memory_bytes=1)


class Clock:
    """Steps of a second each, without waiting for them."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        self.now += 0.5
        return self.now


@pytest.mark.thorough
def test_report_and_status_of_sealed_events_say_what_they_say_of_all_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = []
    for name in ("plain", "sealed"):
        run = tmp_path / name
        with monkeypatch.context() as patched:
            clock = Clock()
            patched.setattr("paceline.clock.now", clock.time)
            RunRecord.begin_attempt(run, job={}, workers=2)
            for worker in (None, 0, 1):
                place = run / "attempt_1" / ("" if worker is None else f"worker_{worker}")
                place.mkdir(parents=True, exist_ok=True)
                log = EventLog(place / "events.jsonl", worker=worker)
                sealing = Sealing(merge=merge_events, cut=lambda lines: max(0, len(lines) - 20), over_bytes=1 << 30)
                log._log._sealing = sealing if name == "sealed" and worker is not None else None
                clock.now = 1000.0
                if worker is None:
                    about: Any = {"run_dir": str(run), "attempt": 1, "workers": 2, "hosts": 1}
                    log.emit(RunStarted(**about, program="p", launcher="local"))
                else:
                    for number, event in enumerate(worker_events(1500, random.Random(worker))):
                        clock.now += 0.5
                        known: Any = event
                        log.emit(dataclasses.replace(known, rank=worker) if hasattr(event, "rank") else event)
                        if number % 600 == 599:
                            log._log.seal()
                log.close()
        RunRecord.load(run).end_attempt("finished", 0)
        raw = json.loads((run / "run.json").read_text())
        for one in (raw, *raw.get("attempts", ())):
            one.update({key: 1000.0 if key == "started" else 4000.0 for key in ("started", "ended") if key in one})
        (run / "run.json").write_text(json.dumps(raw))
        reports.append((read_report(run), status(run)))
    plain, sealed = (report.ledger for report, _ in reports)
    assert sealed_path(tmp_path / "sealed" / "attempt_1" / "worker_0" / "events.jsonl").exists()
    assert sum(1 for _ in lines_of(tmp_path / "sealed" / "attempt_1" / "worker_0" / "events.jsonl")) < 700
    assert sum(plain.worker_s.values()) == pytest.approx(sum(sealed.worker_s.values()))
    for account, seconds in plain.worker_s.items():
        assert sealed.worker_s[account] == pytest.approx(seconds, rel=0.02, abs=1.0), account
    assert sealed.goodput == pytest.approx(plain.goodput, rel=0.01)
    assert (reports[0][0].first_step, reports[0][0].last_step) == (reports[1][0].first_step, reports[1][0].last_step)
    assert [one.step for one in reports[0][1].workers] == [one.step for one in reports[1][1].workers]


def row(step: int, **fields: Any) -> Step:
    values: dict[str, Any] = {"epoch": 0, "time": float(step), "num_samples": 8, "loss": 100 / step, "metrics": {}}
    values |= {"samples_per_s": 8.0, "seconds": {"total": 1.0}, "skipped": False, "num_bytes_sent": 0, "workers": (0,)}
    return Step(step=step, **{**values, **fields})


def test_old_rows_are_thinned_and_the_curve_keeps_its_mean_and_its_spikes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_rows, "NEWEST", 200)
    metrics = MetricsFile(tmp_path / "metrics.jsonl", attempt=1)
    plain = MetricsFile(tmp_path / "plain.jsonl", attempt=1)
    for step in range(1, 2001):
        one = row(step, loss=5000.0 if step == 777 else 100 / step)
        for file in (metrics, plain):
            file.accept(one)
    assert metrics._log is not None and metrics._log.seal() == 1800
    metrics.close()
    plain.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 18 + 200
    whole = [read_curves(tmp_path / name, lambda when: when) for name in ("plain.jsonl", "metrics.jsonl")]
    for name in ("first_loss", "last_loss", "num_losses", "num_samples", "num_broken"):
        assert getattr(whole[0], name) == getattr(whole[1], name), name
    assert whole[1].speed_mean == pytest.approx(whole[0].speed_mean or 0.0)
    assert max(point.most for point in whole[1].loss) == 5000.0


def test_a_resumed_run_drops_rows_of_steps_that_it_takes_again_also_thinned_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_rows, "NEWEST", 100)
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path, attempt=1)
    for step in range(1, 1001):
        metrics.accept(row(step))
    assert metrics._log is not None and metrics._log.seal()
    metrics.close()
    kept = metrics_jsonl.drop_others(path, lambda step, attempt: step <= 850)
    assert kept.ranges() == [(1, 800)] and len(kept) == 800
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(100, 801, 100))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 5))), st.integers(0, 60))
@settings(max_examples=100, deadline=None)
def test_ranges_of_steps_are_a_set(spans: list[tuple[int, int]], after: int) -> None:
    found = StepRanges((first, first + more) for first, more in spans)
    members = {step for first, more in spans for step in range(first, first + more + 1)}
    assert {step for step in range(80) if step in found} == members and len(found) == len(members)
    last = after
    while last + 1 in members:
        last += 1
    assert found.whole_until(after) == last


def test_a_kind_of_event_that_comes_all_the_time_is_summed_up() -> None:
    fields = {"event": "Warned", "time": 1.0, "worker": 0, "text": "again"}
    kept = {"event": "StateKept", "time": 1.0, "worker": 0, "every": 1, "seconds": 0.5, "num_bytes": 1, "travel_s": 0.0}
    lines = [json.dumps(fields)] * 1000 + [json.dumps({**kept, "step": step}) for step in range(1, 1001)]
    merged = [json.loads(line) for line in merge_events(lines)]
    assert len(merged) == 2 * (event_summaries.MOST_KEPT + 1)
    sums = [one for one in merged if one["event"] == "EventsMerged"]
    assert [(one["kind"], one["num"]) for one in sums] == [("Warned", 968), ("StateKept", 968)]
    assert sums[1]["sums"]["seconds"] == 0.5 * 968 and (sums[1]["first_step"], sums[1]["last_step"]) == (17, 984)


def test_summed_up_steps_keep_the_mean_of_their_learning_rates() -> None:
    fields = {"event": "StepDone", "time": 1.0, "worker": 0, "epoch": 0, "num_samples": 8, "loss": 1.0, "metrics": {}}
    fields |= {"seconds": {"total": 1.0}}
    of_optimizer = [{"lr": 0.5}, {"lr": 0.25, "grad_norm": 2.0}, {}]
    lines = [json.dumps({**fields, "step": step, "optimizer": one}) for step, one in enumerate(of_optimizer, 1)]
    (merged,) = map(json.loads, merge_events([*lines, json.dumps({**fields, "step": 4})]))  # an older one has none
    assert merged["optimizer"] == {"lr": 0.375, "grad_norm": 2.0} and merged["num_steps"] == 4


@pytest.mark.thorough
def test_a_supervisors_log_stays_small_and_keeps_each_worker_that_came_or_was_lost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    record = RunRecord.begin_attempt(run, job={}, workers=2)
    directory = run / "attempt_1"
    directory.mkdir()
    log = EventLog(directory / "events.jsonl", worker=None)
    log.emit(RunStarted(run_dir=str(run), attempt=1, workers=2, hosts=1, program="p", launcher="local"))
    for number in range(30_000):
        if number % 3000 == 2999:  # the sealing under way ends, however fast events come
            log.close()
            log = EventLog(directory / "events.jsonl", worker=None)
        log.emit(Warned(text=f"worker 1 is slow ({number} times as slow as the others, in the last 100 steps)"))
        if number % 100 == 0:
            lose(log, 1, number, members=[0])
    log.close()
    files = [directory / "events.jsonl", sealed_path(directory / "events.jsonl")]
    assert sum(path.stat().st_size for path in files) < 2_500_000  # 5.7 MB as they were written
    (attempt,) = read_attempts(record)
    kinds = Counter(type(one.event).__name__ for one in attempt.records)
    assert (kinds["WorkerLost"], kinds["Regrouped"], kinds["RunStarted"]) == (300, 300, 1)
    merged = sum(one.event.num for one in attempt.records if isinstance(one.event, EventsMerged))
    assert kinds["Warned"] + merged == 30_000


def test_a_watch_that_was_stopped_counts_what_was_summed_up_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_summaries, "KEEP_BYTES", 2000)
    monkeypatch.setattr(event_summaries, "KEEP_S", -1.0)
    workers = Workers(tmp_path / "run")
    for log in workers.logs:
        log._log._sealing = Sealing(merge=merge_events, cut=event_summaries.cut_events, over_bytes=1 << 30)
    watch = Watch(workers.run, 1, 2, job=JOB, console="none")
    workers.start()
    for number in range(1, 11):
        workers.step(number)
    watch.poll()
    for number in range(11, 1011):
        workers.step(number)
        if number in (500, 800):
            for log in workers.logs:
                log._log.seal()
    facts = watch.finish("finished", 0)
    workers.close()
    assert facts["step"] == 1010
    steps = StepRanges(
        edges
        for line in (workers.run / "metrics.jsonl").read_text().splitlines()
        for edges in metric_rows.steps_of_row(json.loads(line))
    )
    assert steps.ranges()[-1][1] == 1010 and len(steps) >= 1005
