"""Curves of a growing metrics.jsonl: sampled at first, then exact, read once, also where the file is replaced."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from paceline.logs.metric_rows import merge_rows
from paceline.ui.metrics_index import FollowedMetrics, MetricsIndex
from paceline.ui.metrics_rows import last_rows, sampled_rows
from synthetic_runs import SyntheticRun, long_run

ALL_S = 60.0


@pytest.fixture
def run(tmp_path: Path) -> SyntheticRun:
    made = SyntheticRun(path=tmp_path / "run", steps=40, last_step=1000)
    made.write()
    return made


def metrics(run: SyntheticRun) -> Path:
    return run.path / "metrics.jsonl"


def losses(followed: FollowedMetrics, since: int = 0) -> dict[int, float]:
    points = followed.changes(since).get("loss", {"points": []})["points"]
    return {int(step): mean for _, step, mean, *_ in points}


def replace(path: Path, lines: list[str]) -> None:
    """As a writer does that thins or drops rows: another file takes the place of the old one in one instant."""
    temporary = path.with_name(".new")
    temporary.write_text("".join(f"{line}\n" for line in lines))
    os.replace(temporary, path)


def test_new_rows_are_told_and_nothing_else(run: SyntheticRun) -> None:
    followed = FollowedMetrics(metrics(run))
    followed.poll(ALL_S)
    assert followed.is_whole and sorted(losses(followed)) == [*range(1, 41)]
    seen = followed.revision
    followed.poll(ALL_S)
    assert followed.changes(seen) == {}
    run.append(41, 42)
    followed.poll(ALL_S)
    assert sorted(losses(followed, seen)) == [41, 42]
    assert {"time", "loss", "samples_per_s", "seconds/compute", "seconds/other", "metric/lr"} <= set(
        followed.changes(0)
    )


def test_a_line_that_is_being_written_waits_and_a_damaged_one_is_counted(run: SyntheticRun) -> None:
    followed = FollowedMetrics(metrics(run))
    whole, half = (json.dumps(row) for row in run.rows(41, 42))
    with open(metrics(run), "a") as file:
        file.write(f'{whole}\nno row\n{{"step": true, "time": 1}}\n{half[:50]}')
    followed.poll(ALL_S)
    assert max(losses(followed)) == 41 and followed.index.num_damaged == 2
    with open(metrics(run), "a") as file:
        file.write(f"{half[50:]}\n")
    followed.poll(ALL_S)
    assert max(losses(followed)) == 42 and followed.index.num_damaged == 2


def test_values_that_are_no_numbers_make_no_curve(run: SyntheticRun) -> None:
    odd = {"step": 41, "time": 1.0, "loss": None, "lr": "high", "<b>": 1, "huge": 10**400, "flag": True, "seconds": [1]}
    with open(metrics(run), "a") as file:
        file.write(json.dumps(odd) + "\n")
    followed = FollowedMetrics(metrics(run))
    followed.poll(ALL_S)
    assert max(losses(followed)) == 40 and followed.index.num_broken == 1
    found = followed.changes(0)
    assert "metric/<b>" in found and not {"metric/huge", "metric/flag"} & set(found)
    assert max(one[1] for one in found["metric/lr"]["points"]) == 40


@pytest.mark.thorough
def test_a_long_run_is_shown_at_once_by_some_rows_and_then_exactly(tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 400_000, spike_at=123_456)
    followed = FollowedMetrics(metrics(run))
    followed.poll(0.0)  # no time but for a first look
    first = losses(followed)
    assert not followed.is_whole and 300 < len(first) < 1000 and max(first) == 400_000
    looks = 0
    while not followed.is_whole:
        followed.poll(0.0)
        looks += 1
    assert looks > 3  # it was read in slices
    (spike,) = [one for one in followed.changes(0)["loss"]["points"] if one[4] == 99.0]
    assert abs(spike[1] - 123_456) < 1000
    assert followed.is_replaced_since(2)


def test_after_old_rows_were_thinned_reading_goes_on_behind_the_last_row(
    run: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.append(41, 300)
    followed = FollowedMetrics(metrics(run))
    followed.poll(ALL_S)
    seen, before = followed.revision, losses(followed)
    lines = metrics(run).read_text().splitlines()
    replace(metrics(run), [*merge_rows(lines[:200]), *lines[200:]])
    run.append(301, 303)
    read: list[bytes] = []
    add_line = MetricsIndex.add_line
    monkeypatch.setattr(MetricsIndex, "add_line", lambda self, line, no: (read.append(line), add_line(self, line, no)))
    followed.poll(ALL_S)
    followed.poll(ALL_S)
    assert len(read) == 3 and sorted(losses(followed, seen)) == [301, 302, 303]
    assert losses(followed) == before | losses(followed, seen)


def test_rows_that_a_resumed_attempt_has_dropped_are_gone(run: SyntheticRun) -> None:
    followed = FollowedMetrics(metrics(run))
    followed.poll(ALL_S)
    seen = followed.revision
    lines = metrics(run).read_text().splitlines()
    again = [json.dumps(row | {"attempt": 2, "loss": 7.0}) for row in run.rows(21, 25)]
    replace(metrics(run), [*lines[:20], *again])
    followed.poll(ALL_S)
    assert sorted(losses(followed)) == [*range(1, 26)]
    assert losses(followed)[21] == 7.0 and followed.is_replaced_since(seen)


def test_a_file_that_is_not_there_yet_has_no_curves(tmp_path: Path) -> None:
    followed = FollowedMetrics(tmp_path / "metrics.jsonl")
    followed.poll(ALL_S)
    assert followed.changes(0) == {} and followed.is_whole
    assert sampled_rows(tmp_path / "metrics.jsonl", 10) == [] == last_rows(tmp_path / "metrics.jsonl", 10)
    os.mkfifo(tmp_path / "metrics.jsonl")  # nobody writes into it
    began = time.perf_counter()
    followed.poll(ALL_S)
    assert followed.changes(0) == {} and time.perf_counter() - began < 5


def test_sampled_rows_are_spread_over_the_file_and_the_last_ones_are_its_end(tmp_path: Path) -> None:
    run = SyntheticRun(path=tmp_path / "run", steps=3000)
    run.write()
    steps = [row["step"] for row in sampled_rows(metrics(run), 30)]
    assert steps == sorted(steps) and 28 <= len(steps) <= 31 and steps[0] <= 2 and steps[-1] > 2850
    assert [row["step"] for row in last_rows(metrics(run), 3)] == [2998, 2999, 3000]
