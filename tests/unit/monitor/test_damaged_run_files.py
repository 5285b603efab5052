"""Files of a run may hold anything: a damaged line is named and passed over, without a traceback or much memory."""

from __future__ import annotations

import io
import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import quick
from fake_run_files import JOB, Workers
from paceline.events import (
    EventLog,
    Regrouped,
    RunFinished,
    RunStarted,
    StepDone,
    StreamOpened,
    Warned,
    WorkerFinished,
    WorkerJoined,
    WorkerLost,
    WorkerStarted,
)
from paceline.launch.job.outcome import read_error
from paceline.logs.ledger_runs import MOST_LINES, merge_ledger
from paceline.logs.log_reader import TOO_LONG, last_lines, lines_of
from paceline.logs.metric_rows import merge_rows
from paceline.logs.sealed_log import LineLog, Sealing
from paceline.monitor.audit.audit import audit, main_audit
from paceline.monitor.records.run_record import RunRecord
from paceline.monitor.report.command import main_report
from paceline.monitor.status.logs import main_logs
from paceline.monitor.status.status import main_status
from paceline.monitor.status.stop import main_stop
from paceline.monitor.watch import Watch

OPENING = {"stream": "train", "samples": 96, "batch": 8, "micro": 4, "seed": 3, "shuffle": True, "drop_last": False}
SECONDS = {"data": 0.01, "compute": 0.05, "communication": 0.02, "optimizer": 0.01, "total": 0.1}
WHERE = {"host": "a", "pid": 1}
COMMANDS: tuple[Callable[[Path], int], ...] = (
    main_status,
    lambda run: main_status(run, json=True),
    main_audit,
    lambda run: main_audit(run, json=True),
    lambda run: main_report(run, page=run / "page.html"),
    lambda run: main_report(run, json=True),
    main_logs,
    main_stop,
)
HOSTILE = [
    None, True, -1, 10**8, 10**12, "9" * 400, 1e308, 1e300, "", "\x1b[2J", [], [[]], {}, {"a": {"b": [1]}}, [1, "x"],
    [[1, "x"]], {"total": "x"}, 3.7, ["train"], {"steps": 5},
]  # fmt: skip
RAW = {"9" * 400: "9" * 400, "1e308": "1e999"}  # as numbers: JSON of Python's own writer has no such
LINES = [
    "", "null", "5", "[]", "{", "{}", '"x"', "\x00\x00\xff", "[" * 5000, '{"a":' * 3000, "9" * 5000, "NaN",
    '{"event": []}', '{"event": "StepDone"}', '{"step": 5}', '{"merged": 3}', '{"runs": 5}', '{"runs": [], "more": 1}',
    '{"runs": [], "order": [0], "next": [[]]}', '{"sealed": {"bytes": -5, "lines": 3}}', '{"sealed": 5}',
    '{"rollback": {"to_step": 1, "from_step": 2, "skips": 5}}', '{"rollback": {}}', '{"from_step": Infinity}',
]  # fmt: skip


def write_worker(directory: Path, worker: int) -> None:
    directory.mkdir(parents=True)
    log = EventLog(directory / "events.jsonl", worker=worker)
    about: dict[str, Any] = {"workers": 2, "host": "a", "device": "cpu", "startup_s": 1.0, "plan": "replicas=2"}
    log.emit(WorkerStarted(rank=worker, pid=os.getpid(), resumed_from_step=0, **about))
    log.emit(StreamOpened(name="train", num_samples=96, epochs=2, last_step=24))
    for step in range(1, 25):
        log.emit(StepDone(step=step, epoch=0, num_samples=8, loss=0.5, metrics={"a": 1.0}, seconds=SECONDS))
    log.emit(WorkerFinished(rank=worker, step=24, peak_memory_bytes=5))
    log.close()
    sealing = Sealing(merge=merge_ledger, cut=lambda lines: max(0, len(lines) - 6), over_bytes=1 << 30)
    ledger = LineLog(directory / "ledger.jsonl", sealing=sealing)
    lines: list[Any] = [{"attempt": 1, "from_step": 0, "of_attempt": None, "starts": {"train": [0, 0]}}, OPENING]
    for step in range(1, 25):
        epoch, place = divmod(step - 1, 12)
        begin = 8 * place + 4 * worker
        lines.append(
            {"step": step, "stream": "train", "epoch": epoch, "ranges": [[begin, begin + 4]], "skipped": False}
        )
        lines[-1] |= {"behind": 0, "whole": [8 * place, 8 * place + 8]} if step > 12 else {}
    for number, line in enumerate(lines):
        ledger.write(json.dumps(line))
        if number == 20:
            ledger.seal()
    ledger.close()
    (directory / "stdout.log").write_text("hello\n")
    (directory / "error.json").write_text(json.dumps({"kind": "E", "message": "m", "time": 1.0, "step": 3}))


def write_run(run: Path) -> Path:
    """A run of two workers of which one was lost, with every kind of file and of line."""
    record = RunRecord.begin_attempt(run, job={"max_steps": 24, "grace_s": 1.0}, workers=2, plan="replicas=2")
    for worker in range(2):
        write_worker(run / "attempt_1" / f"worker_{worker}", worker)
    log = EventLog(run / "attempt_1" / "events.jsonl", worker=None)
    log.emit(RunStarted(run_dir=str(run), attempt=1, workers=2, hosts=1, program="p", launcher="local"))
    log.emit(WorkerLost(rank=1, host="a", step=3, reason="killed", silent_s=1.0))
    log.emit(Regrouped(causes=["x"], members=[0], step=3, detected_s=0.1, regrouped_s=0.1, steps_lost=0, holds=False))
    log.emit(WorkerJoined(rank=1, step=5, after_s=1.0))
    log.emit(Warned(text="slow"))
    log.emit(RunFinished(state="finished", exit_code=0, duration_s=3.0))
    log.close()
    rows = [{"step": step, "attempt": 1, "epoch": 0, "time": record.started + step, "num_samples": 8, "loss": 0.5,
             "samples_per_s": 80.0, "skipped": False, "seconds": SECONDS} for step in range(1, 110)]  # fmt: skip
    (run / "metrics.jsonl").write_text("\n".join(merge_rows(list(map(json.dumps, rows)))) + "\n")
    facts = {"attempt": 1, "step": 24, "steps": 24, "steps_unsaved": 0, "checkpoints_saved": 1}
    (run / "summary.json").write_text(json.dumps(facts))
    record.end_attempt("finished", 0)
    return run


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("whole") / "run")


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list) else ()):
        yield from places(inner, (*place, key))


def damaged(line: str, data: st.DataObject) -> str:
    """A line with something else in it, or in its place, or cut off."""
    kind = data.draw(st.sampled_from(["value", "value", "value", "line", "cut"]))
    if kind == "cut" or not line.strip():
        return line[: data.draw(st.integers(0, len(line)))]
    if kind == "line":
        return data.draw(st.sampled_from(LINES))
    fields = json.loads(line)
    place = data.draw(st.sampled_from(list(places(fields))[1:] or [("x",)]))
    inner = fields
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = data.draw(st.sampled_from(HOSTILE))
    text = json.dumps(fields)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw).replace("1e+308", raw if raw == "1e999" else "1e+308")
    return text


@given(data=st.data())
@settings(max_examples=quick.examples(60), deadline=None, phases=[Phase.generate])
@pytest.mark.thorough
def test_no_damage_of_a_run_file_ends_a_command_in_a_traceback(
    whole_run: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(whole_run, run)
    path = data.draw(
        st.sampled_from(sorted(path for path in run.rglob("*.json*") if path.suffix in (".json", ".jsonl")))
    )
    if path.suffix == ".json":
        path.write_text(damaged(path.read_text(), data))
    else:
        lines = path.read_text().split("\n")
        for number in data.draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=3, unique=True)):
            lines[number] = damaged(lines[number], data) if lines[number][:1] == "{" else ""
        path.write_text("\n".join(lines))
    read_error(run / "attempt_1" / "worker_0")
    for command in COMMANDS:
        assert command(run) in (0, 1, 2)
    shutil.rmtree(run)


def test_a_damaged_line_is_named_with_its_file(
    whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole_run, tmp_path / "run")
    for name in ("attempt_1/events.jsonl", "attempt_1/worker_0/events.jsonl", "metrics.jsonl"):
        path = run / name
        lines = path.read_text().split("\n")
        lines[-5] = lines[-5].replace('"time":', '"time": "noon", "tame":')  # the last of a kind may have been cut off
        path.write_text("\n".join(lines))
    for command in (main_status, main_report):
        assert command(run) == 0
        said = " ".join(capsys.readouterr().out.split())
        for name in ("attempt_1/events.jsonl", "metrics.jsonl"):
            assert f"{name} has a line that cannot be read" in said
    assert "worker_0/events.jsonl has a line that cannot be read" in said


def unreadable(path: Path, kind: str) -> None:
    """Put something in a file's place that cannot be read, or not to an end."""
    path.unlink()
    match kind:
        case "directory":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case _:
            path.symlink_to(path)


KINDS = ("directory", "pipe", "device", "link to itself")  # the last counts as none where files are looked for


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", ["events.jsonl", "worker_1/events.jsonl", "worker_1/ledger.jsonl", "worker_1/events.sealed.jsonl.gz",
             "worker_1/ledger.sealed.jsonl.gz", "worker_1/error.json", "worker_1/stdout.log", "../metrics.jsonl"],
)  # fmt: skip
def test_a_file_that_cannot_be_read_is_named_and_passed_over(
    kind: str, name: str, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole_run, tmp_path / "run")
    path = (run / "attempt_1" / name).resolve()
    path.touch()
    unreadable(path, kind)
    said = ""
    for command in COMMANDS:
        assert command(run) in (0, 1, 2)
        said += "".join(capsys.readouterr())
    is_told = path.suffix == ".jsonl" or name == "worker_1/ledger.sealed.jsonl.gz" or path.suffix == ".log"
    assert (path.name in said) == is_told and "Traceback" not in said


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_record_that_cannot_be_read_is_refused_by_name(
    kind: str, whole_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole_run, tmp_path / "run")
    unreadable(run / "run.json", kind)
    assert main_status(run) == main_report(run) == 2
    assert capsys.readouterr().err.count("run.json cannot be read") == 2
    with pytest.raises(ValueError, match=r"run\.json cannot be read"):
        RunRecord.begin_attempt(run, job={}, workers=2)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_a_file_of_an_earlier_attempt_that_cannot_be_read_is_told_once(
    kind: str, whole_run: Path, tmp_path: Path
) -> None:
    run, stream = shutil.copytree(whole_run, tmp_path / "run"), io.StringIO()
    names = ("worker_1/events.jsonl", "worker_0/ledger.jsonl")
    for name in names:
        unreadable(run / "attempt_1" / name, kind)
    workers = Workers(run)
    watch = Watch(run, 2, 2, job=JOB, stream=stream)
    workers.start(resumed_from_step=20)
    for step in (21, 22):
        watch.poll()
        workers.step(step)
    workers.close()
    assert watch.finish("finished", 0)["exit_code"] == 0
    for name in names:
        assert stream.getvalue().count(f"warning: run/attempt_1/{name}: it cannot be read (") == 1
    assert "attempt 1 came to step 24, and saved step 20 last: 4 steps are taken again" in stream.getvalue()


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_metrics_that_cannot_be_read_are_not_written_on_and_the_run_goes_on(
    kind: str, whole_run: Path, tmp_path: Path
) -> None:
    run, stream = shutil.copytree(whole_run, tmp_path / "run"), io.StringIO()
    unreadable(run / "metrics.jsonl", kind)
    workers = Workers(run)
    watch = Watch(run, 2, 2, job=JOB, stream=stream)
    workers.start(resumed_from_step=20)
    workers.step(21)
    watch.poll()
    workers.close()
    assert watch.finish("finished", 0)["step"] == 21
    assert stream.getvalue().count("metrics.jsonl could not be written: ") == 1


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_what_is_put_in_the_place_of_an_attempts_own_files_ends_no_run(kind: str, tmp_path: Path) -> None:
    workers, stream = Workers(tmp_path / "run"), io.StringIO()
    watch = Watch(workers.run, 1, 2, job=JOB, stream=stream)
    workers.start()
    workers.step(1)
    watch.poll()
    workers.close()
    for place in workers.directories:
        unreadable(place / "events.jsonl", kind)
        (place / "stderr.log").touch()
        unreadable(place / "stderr.log", kind)
    for _ in range(3):
        watch.poll()
    assert watch.finish("finished", 0)["exit_code"] == 0
    for name in ("events.jsonl", "stderr.log"):
        assert stream.getvalue().count(f"warning: run/attempt_1/worker_1/{name}: it cannot be read (") == 1


def test_one_line_of_a_ledger_stands_for_no_more_steps_than_fit_into_memory(whole_run: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole_run, tmp_path / "run")
    line = {"step": 25, "stream": "train", "epoch": 9, "ranges": [[0, 4]], "skipped": True}
    one, many = {**line, "more": [10**8, 2, 0]}, {"runs": [line, line], "more": [10**8, 1, 0, 0]}
    mixed = {"runs": [one], "next": [[0, 1, 0, 0]], "order": [0]}
    with open(run / "attempt_1" / "worker_0" / "ledger.jsonl", "a") as file:
        file.writelines(json.dumps(each) + "\n" for each in (one, many, mixed))
    problems = audit(run).problems
    assert sum(f"one stands for {MOST_LINES} at most" in problem for problem in problems) == 3


def test_lines_of_a_long_run_are_merged_into_as_many_as_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.logs.ledger_runs.MOST_LINES", 10)
    lines = [
        json.dumps({"step": step, "stream": "train", "epoch": 0, "ranges": [[step, step + 1]], "skipped": False})
        for step in range(1, 36)
    ]
    assert [json.loads(line)["more"][0] + 1 for line in merge_ledger(lines)] == [10, 10, 10, 5]


@pytest.mark.thorough
def test_a_log_of_one_endless_line_takes_little_memory_and_the_lines_around_it_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with open(path, "wb") as file:
        file.write(b"first\n")
        file.seek(64 << 20, os.SEEK_CUR)  # zeros: a hole that takes no disk
        file.write(b"\nlast\n")
    tracemalloc.start()
    try:
        assert list(lines_of(path)) == ["first", TOO_LONG, "last"]
        assert list(last_lines(path)) == ["last", TOO_LONG, "first"]
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("at", [0, 12, 40])
def test_damage_inside_of_a_sealed_file_is_said(tmp_path: Path, at: int) -> None:
    log = LineLog(tmp_path / "ledger.jsonl", sealing=Sealing(merge=list, cut=len, over_bytes=1 << 30))
    for number in range(50):
        log.write(f"{number} {number**9}")
    log.seal()
    log.close()
    sealed = tmp_path / "ledger.sealed.jsonl.gz"
    content = bytearray(sealed.read_bytes())
    content[at : at + 8] = b"\xff" * 8
    sealed.write_bytes(content)
    assert "are lost: it is missing, or damaged" in list(lines_of(tmp_path / "ledger.jsonl"))[-1]
    assert "are lost: it is missing, or damaged" in next(last_lines(tmp_path / "ledger.jsonl"))
