"""The rules of buffers: what a trial shows, and queues whose rows come from several micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.schedule.micro_batches import MicroBatch
from paceline.worker.step.buffer_captures import BufferSpec, FirstCapture
from paceline.worker.step.buffer_queue import QueueForm, find_queue, merged_queue, written_rows
from paceline.worker.step.buffer_rules import TriedBuffer, contradicted_rules, found_rule, given_rules

START = torch.tensor([0.5, -1.0, 2.0])
A, B = torch.tensor([1.0, 2.0, -3.0]), torch.tensor([0.25, -4.0, 1.0])


def tried(
    update: Callable[[Tensor, Tensor], Tensor], start: Tensor = START, a: Tensor = A, b: Tensor = B
) -> TriedBuffer:
    first = update(start, a)
    return TriedBuffer(start=start, first=first, second=update(start, b), both=update(first, b), is_one_batch=False)


@pytest.mark.parametrize(
    ("update", "rule"),
    [
        (lambda old, x: 0.9 * old + 0.1 * x, "mean"),
        (lambda old, x: 0.9 * old + 0.1 * x**2, "mean"),
        (lambda old, x: old + x, "sum"),
        (lambda old, x: torch.ones(3), "first"),
        (lambda old, x: torch.nn.functional.normalize(old + 1, dim=0), "first"),
        (lambda old, x: torch.maximum(old, x), None),
        (lambda old, x: x, None),
        (lambda old, x: 0.9 * old * x.abs().mean() + x, None),
    ],
    ids=["average", "average_of_squares", "sum", "constant", "without_data", "maximum", "last", "not_linear"],
)
def test_a_trial_shows_the_rule_of_what_a_forward_writes(
    update: Callable[[Tensor, Tensor], Tensor], rule: str | None
) -> None:
    assert found_rule(tried(update), is_persistent=True) == rule


def test_a_trial_that_changes_nothing_shows_nothing_and_a_small_one_rules_out() -> None:
    """A worker whose micro-batches leave a buffer alone may not decide for those that have changed it."""
    rare = {kind: tried(lambda old, x: old + (x > 4).sum(), torch.tensor([7]), a, b)
            for kind, (a, b) in {"none": (A, B), "one": (A, 5 * A), "both": (5 * A, 9 * A)}.items()}  # fmt: skip
    shown = {kind: (found_rule(one, is_persistent=True), contradicted_rules(one)) for kind, one in rare.items()}
    assert shown["none"] == (None, frozenset())
    assert shown["one"] == (None, {"first"})
    assert shown["both"][0] == "sum"
    largest = tried(torch.maximum)
    assert contradicted_rules(largest) == {"first", "mean"}


def test_whole_numbers_and_truth_values() -> None:
    count = tried(lambda old, x: old + x, torch.tensor([3]), torch.tensor([4]), torch.tensor([5]))
    pointer = tried(lambda old, x: (old + x) % 7, torch.tensor([3]), torch.tensor([3]), torch.tensor([3]))
    no, yes = torch.tensor([False, False]), torch.tensor([False, True])
    met = tried(lambda old, x: old | x, no, yes, ~yes)
    assert [found_rule(one, is_persistent=True) for one in (count, pointer, met)] == ["sum", None, "sum"]


def test_rows_of_several_micro_batches_go_into_a_ring_in_their_order() -> None:
    start, pointer = torch.arange(8.0).reshape(4, 2), torch.tensor([3])
    after = start.clone()
    after[[3, 0]] = torch.tensor([[10.0, 10.0], [11.0, 11.0]])
    forms = dict(find_queue(start, after, {"pointer": (pointer, torch.tensor([1]))}))
    form = QueueForm("ring", 0, "pointer")
    assert forms[form] == 2
    rows = written_rows(form, after, 2, pointer)
    merged = merged_queue(form, start, [rows, rows + 5], pointer)
    assert merged[:, 0].tolist() == [11.0, 15.0, 16.0, 10.0]
    more = merged_queue(form, start, [rows, rows + 5, rows + 7], pointer)
    assert more[:, 0].tolist() == [18.0, 15.0, 16.0, 17.0], "the newest rows stay"


def test_rows_that_shift_a_queue_stay_in_their_order() -> None:
    start, new = torch.arange(5.0), torch.tensor([7.0, 8.0])
    append = find_queue(start, torch.cat([start[2:], new]), {})
    prepend = find_queue(start, torch.cat([new, start[:-2]]), {})
    assert append == [(QueueForm("append", 0), 2)] and prepend == [(QueueForm("prepend", 0), 2)]
    assert merged_queue(append[0][0], start, [new, new + 2], None).tolist() == [4.0, 7.0, 8.0, 9.0, 10.0]
    assert merged_queue(prepend[0][0], start, [new, new + 2], None).tolist() == [9.0, 10.0, 7.0, 8.0, 0.0]


def test_rules_that_are_given_fit_buffers_by_name() -> None:
    assert given_rules(["queue", "head.seen"], {"*.seen": "sum"}) == {"head.seen": "sum"}
    with pytest.raises(ValueError, match="a rule is one of mean, sum, first, gather"):
        given_rules(["queue"], {"queue": "average"})
    with pytest.raises(ValueError, match="fits no buffer of the model"):
        given_rules(["queue"], {"queues": "gather"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_first_micro_batch_wrote_stays_when_the_buffer_is_written_again(dtype: torch.dtype) -> None:
    buffer, micros = torch.tensor([1.0, 2.0], dtype=dtype), [MicroBatch(0, 0, 2), MicroBatch(1, 2, 4)]
    captured = FirstCapture()
    captured.add(buffer, torch.zeros(2, dtype=dtype), micros[0])
    buffer.fill_(7)
    captured.add(buffer, torch.zeros(2, dtype=dtype), micros[1])
    assert captured.has_written(0)
    assert captured.share(BufferSpec(buffer.shape, dtype, buffer.device), micros).tolist() == [1.0, 2.0]
