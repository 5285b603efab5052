"""Lines of a ledger can be written again from what they were merged to."""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.logs.ledger_runs import join_runs, merge_ledger, run_of, runs_in

Line = dict[str, Any]


def unmerged(lines: list[str]) -> list[Line]:
    found: list[Line] = []
    for text in lines:
        line = json.loads(text)
        found += [one for run in runs_in(line) for one in run.lines()] if "step" in line or "runs" in line else [line]
    return found


def step(number: int, epoch: int, start: int, stop: int, **more: Any) -> Line:
    line = {"step": number, "stream": "train", "epoch": epoch, "ranges": [[start, stop]], "skipped": False}
    return {**line, **more}


def test_a_thousand_epochs_are_a_few_lines() -> None:
    lines = []
    for number in range(10_000):
        epoch, place = divmod(number, 98)
        lines.append(step(number + 1, epoch, place * 512 + 16, min(place * 512 + 32, 50_000)))
    merged = merge_ledger([json.dumps(line) for line in lines])
    assert len(merged) <= 3
    assert unmerged(merged) == lines


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["uneven shares", "backup workers", "asynchronous", "two streams"])
def test_steps_in_an_irregular_order_are_a_mixture_of_a_few_bytes_each(kind: str) -> None:
    draw = random.Random(1)
    lines: list[Line] = []
    number = start = 0
    for _ in range(4000):
        number += draw.choice((1, 1, 2, 5)) if kind == "asynchronous" else 1
        epoch, place = divmod(number, 98)
        start = place * 512
        first, last = draw.randrange(3), draw.randrange(3, 6)
        match kind:
            case "uneven shares":
                lines.append(step(number, epoch, start + first * 16, start + last * 16))
            case "backup workers":
                late = {"dropped": [[start + 16 * last, start + 16 * last + 16]]} if first else {}
                lines.append(step(number, epoch, start, start + 16, whole=[start, start + 512], **late))
            case "asynchronous":
                lines.append(step(number, epoch, start, start + 512, whole=[start, start + 512], behind=first))
            case _:
                lines.append({**step(number, 0, number * 8, number * 8 + 8), "stream": "train" if first else "other"})
    texts = [json.dumps(line) for line in lines]
    merged = merge_ledger(texts)
    assert unmerged(merged) == lines or kind == "two streams"
    assert sorted(unmerged(merged), key=lambda line: line["step"]) == lines
    small, large = (len(zlib.compress("\n".join(some).encode(), 6)) for some in (merged, texts))
    assert small < 1.5 * len(lines) and small < large / 6


def test_two_streams_in_turns_are_two_runs() -> None:
    lines = [step(number, 0, number * 8, number * 8 + 4) for number in range(1, 101)]
    lines = [{**line, "stream": "train" if line["step"] % 2 else "other"} for line in lines]
    merged = merge_ledger([json.dumps(line) for line in lines])
    assert len(merged) == 2
    assert sorted(unmerged(merged), key=lambda line: line["step"]) == lines


def test_one_line_of_a_run_is_equal_to_the_run_that_it_is_alone() -> None:
    """Else a worker that came later would seem to disagree with those whose steps were joined."""
    alone = [run_of(step(number, 0, number * 12, number * 12 + 4, whole=[number * 12, 40])) for number in (1, 2, 3)]
    (joined,) = join_runs(run_of(step(number, 0, number * 12, number * 12 + 4)) for number in (1, 2, 3))
    assert joined.num == 3 and joined.part(0, 3) == joined
    assert [joined.part(index, index + 1).shift for index in range(3)] == [one.shift for one in alone] == [0, 0, 0]
    assert joined.part(1, 2) == run_of(step(2, 0, 24, 28))


edges = st.integers(0, 40)
ranges = st.lists(st.tuples(edges, edges).map(list), max_size=2)
extras = st.fixed_dictionaries(
    {}, optional={"whole": st.tuples(edges, edges).map(list), "dropped": ranges, "behind": st.integers(0, 3)}
)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), ranges, st.booleans(), extras), max_size=30))
@settings(max_examples=60, deadline=None)
def test_any_lines_of_a_stream_come_back_in_order(told: list[tuple[int, int, Any, bool, Line]]) -> None:
    lines, number = [], 0
    for distance, epoch, used, skipped, more in told:
        number += distance
        lines.append({"step": number, "stream": "s", "epoch": epoch, "ranges": used, "skipped": skipped, **more})
    texts = [json.dumps(line) for line in lines]
    texts[len(texts) // 2 : len(texts) // 2] = ['{"rollback": {}}', "{cut off"]
    merged = merge_ledger(texts)
    assert "{cut off" in merged
    lines.insert(len(lines) // 2, {"rollback": {}})
    assert unmerged([text for text in merged if text != "{cut off"]) == lines
