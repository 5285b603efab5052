"""Finds the rules of buffers by trial, in the first step that changes them, and agrees on them with all workers.

The trial runs two micro-batches A and B once more (see `trial_runs`): A, B, and A and then B, each from the step's
buffers. Where no whole forward can be run, the module that has the buffer is called alone, as it was in the step.
`buffer_rules` and `buffer_queue` judge it. What is found is exchanged once, and a buffer of which nothing is found ends
the run before its first step is taken.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.group import WorkerGroup
from paceline.host_memory import is_out_of_memory
from paceline.plan import Plan
from paceline.worker.data.step_batch import StepBatch
from paceline.worker.step.buffer_queue import QueueForm, find_queue, merged_queue, written_rows
from paceline.worker.step.buffer_rules import BufferRule, TriedBuffer, contradicted_rules, found_rule, unknown_rule_text
from paceline.worker.step.model_buffers import BufferAverager
from paceline.worker.step.tracked_buffer import BufferKey, TrackedBuffer
from paceline.worker.step.trial_runs import TrialForwards, TrialRuns

__all__ = ["BufferTrials"]

POINTER_WORDS = ("ptr", "pointer", "cursor", "head", "tail", "pos", "index", "idx")  # in names of pointers


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """What one worker has found of one buffer."""

    rule: BufferRule | None = None
    contradicts: frozenset[BufferRule] = frozenset()  # rules that its trial rules out
    forms: tuple[QueueForm, ...] = ()
    is_tried: bool = False  # it ran a trial, and the buffer has changed; else it may know nothing
    is_cache: bool = False
    is_empty: bool = False  # it was None at the step's beginning
    is_known: bool = False  # by an earlier exchange, by its type, or because the user said so


class BufferTrials:
    """The trials of one worker."""

    def __init__(self, plan: Plan, buffers: BufferAverager, runs: TrialRuns) -> None:
        self._plan, self._buffers, self._runs = plan, buffers, runs

    def settle(self, batch: StepBatch, marks: Sequence[float], *, num_micros: int, group: WorkerGroup) -> None:
        """Find the rules of the buffers that have changed and that some worker knows none of.

        All workers of the `group` call it, with the same summed `marks`. A worker that knows a rule (the others have
        come later, or a loss has cut off the exchange between them) gives it to the others.

        Raises ValueError, on all of them, where nothing is found and there is more than one micro-batch.
        """
        is_apart = self._plan.is_local or self._plan.is_asynchronous  # then the rule is needed between replicas, too
        unknown = self._buffers.without_rule(marks)
        if not unknown or (num_micros == 1 and not is_apart):
            return
        findings = self._findings(batch, unknown)
        answers = group.gather_objects([findings[one.key] for one in unknown])
        pairs = [(one, each) for one, each in zip(unknown, zip(*answers, strict=True), strict=True) if _matters(each)]
        queues = self._settle_queues(pairs)
        if queues and is_apart:
            raise ValueError(
                f"buffer {queues[0]} is a queue, and under {self._plan.sync!r} replicas take steps by themselves: "
                "there is no order of their rows. Use sync=AllReduce(), or give the buffer another rule in "
                "worker.prepare(model, buffers=...)"
            )
        for buffer, found in pairs:
            if buffer.has_rule:
                continue
            known = {one.rule for one in found if one.is_known and one.rule is not None}
            if len(known) == 1:
                self._buffers.rules.rules[buffer.key] = known.pop()
                continue
            agreed = {one.rule for one in found if one.rule is not None}
            ruled_out = frozenset[BufferRule]().union(*(one.contradicts for one in found))
            if buffer.rule is None and len(agreed) == 1 and not agreed & ruled_out:
                self._buffers.rules.rules[buffer.key] = agreed.pop()
            else:
                raise ValueError(self._refusal(buffer, found, agreed))

    def _settle_queues(self, pairs: Sequence[tuple[TrackedBuffer, Sequence[Finding]]]) -> list[str]:
        """Settle the buffers that are queues, with their pointers; returns their names."""
        rules, names = self._buffers.rules, list[str]()
        for buffer, found in pairs:
            known = next((one.forms[0] for one in found if one.is_known and one.forms), None)
            form = known or _agreed_form(found)
            is_other = known is None and any(one.rule is not None for one in found)
            if form is not None and buffer.rule in (None, "gather") and (form.kind == "ring" or not is_other):
                names.append(buffer.full_name)
                rules.rules[buffer.key], rules.queues[buffer.key] = "gather", form
                if form.pointer:
                    rules.pointers[BufferKey(buffer.module, form.pointer)] = buffer.key
        return names

    def _refusal(self, buffer: TrackedBuffer, found: Sequence[Finding], agreed: set[BufferRule]) -> str:
        if buffer.rule == "gather":
            why = (
                "it is to be gathered, but its rows are not written one after another, from a pointer on that is an "
                "integer buffer of the same module, with the same number for each sample"
            )
        elif len(agreed) > 1:
            why = f"by trial it is {' and '.join(sorted(agreed))} on different workers"
        elif any(one.is_tried for one in found):
            why = "in a trial it is neither a running mean, nor a sum, nor a queue with a pointer, named as one"
        else:
            why = "no trial could be made here"
        shape = list(buffer.saved.shape) if buffer.saved is not None else []
        return unknown_rule_text(buffer.full_name, shape, why)

    def _findings(self, batch: StepBatch, buffers: Sequence[TrackedBuffer]) -> dict[BufferKey, Finding]:
        tried = self._tried(batch, buffers)
        found: dict[BufferKey, Finding] = {}
        for buffer in buffers:
            if buffer.has_rule and not buffer.is_pointer:
                form = () if buffer.queue is None else (buffer.queue,)
                found[buffer.key] = Finding(rule=None if form else buffer.rule, forms=form, is_known=True)
                continue
            one = tried.get(buffer.key)
            found[buffer.key] = Finding(
                rule=found_rule(one, is_persistent=buffer.is_persistent) if one is not None else None,
                contradicts=contradicted_rules(one) if one is not None else frozenset(),
                forms=self._forms(buffer, tried),
                is_tried=one is not None and bool(buffer.each),
                is_cache=buffer.is_cache and not buffer.is_on_other_stage,
                is_empty=buffer.saved is None and not buffer.is_on_other_stage,
            )
        return found

    def _forms(self, buffer: TrackedBuffer, tried: dict[BufferKey, TriedBuffer]) -> tuple[QueueForm, ...]:
        """The forms of a queue that all micro-batches of this worker show, and the trial, where there was one."""
        beside = self._buffers.integers_beside(buffer)
        possible: list[QueueForm] | None = None
        for micro, num_samples, value in buffer.each:
            if micro is None or buffer.saved is None:
                return ()
            pointers = {
                name: (one.saved, end)
                for name, one in beside.items()
                for its_micro, _, end in one.each
                if one.saved is not None and its_micro == micro
            }
            here = [
                form
                for seen, num in find_queue(buffer.saved, value, pointers)
                for form in _rates(seen, num, num_samples)
            ]
            possible = here if possible is None else [form for form in possible if form in here]
        one = tried.get(buffer.key)
        if one is None or not possible:
            return tuple(possible or ())
        return tuple(form for form in possible if _is_shown(form, one, tried, buffer))

    def _tried(self, batch: StepBatch, buffers: Sequence[TrackedBuffer]) -> dict[BufferKey, TriedBuffer]:
        forwards = self._runs.forwards(batch)
        found: dict[BufferKey, TriedBuffer] = {}
        if forwards is not None:
            found = self._trial(batch, buffers, forwards)
        else:
            for owner in dict.fromkeys(one.module for one in buffers):
                if calls := self._runs.calls_of(owner):
                    own = [one for one in buffers if one.module is owner]
                    try:
                        found |= self._trial(batch, own, calls)
                    except Exception as error:  # a part of a model may need what is around it
                        if is_out_of_memory(error):
                            raise
        return {one.key: found[one.key] for one in buffers if one.key in found and _is_seen(one, found[one.key])}

    def _trial(
        self, batch: StepBatch, buffers: Sequence[TrackedBuffer], forwards: TrialForwards
    ) -> dict[BufferKey, TriedBuffer]:
        """What A, B, and A and then B leave in the buffers, which are put back."""
        values: list[dict[BufferKey, Tensor]] = []
        with self._runs.opened(batch) as run:
            for which in ((0,), (1,), (0, 1)):
                for number in which:
                    run(forwards, number)
                values.append({one.key: now.detach().clone() for one in buffers if (now := one.current()) is not None})
                self._buffers.undo()
        return {
            one.key: TriedBuffer(
                start=one.saved,
                first=values[0][one.key],
                second=values[1][one.key],
                both=values[2][one.key],
                is_one_batch=forwards.are_of_one_batch,
            )
            for one in buffers
            if one.saved is not None and all(one.key in each for each in values)
        }


def _is_seen(buffer: TrackedBuffer, tried: TriedBuffer) -> bool:
    """Whether a trial changed a buffer that the step has changed: else something outside of its calls writes it."""
    is_left = all(torch.equal(value, tried.start) for value in (tried.first, tried.second, tried.both))
    return not (is_left and any(not torch.equal(value, tried.start) for _, _, value in buffer.each))


def _rates(form: QueueForm, num: int, num_samples: int) -> list[QueueForm]:
    """The form with the number of rows that a sample may bring, or a micro-batch."""
    found = [dataclasses.replace(form, rows=num, is_per_sample=False)]
    if num % num_samples == 0:
        found.insert(0, dataclasses.replace(form, rows=num // num_samples))
    return found


def _matters(found: Sequence[Finding]) -> bool:
    """Whether a rule is needed: each worker keeps its own cache, and what is filled the first time becomes a mean."""
    return not any(one.is_cache or one.is_empty for one in found)


def _agreed_form(found: Sequence[Finding]) -> QueueForm | None:
    """The first form that all workers have seen of which any has; None where several integers may be its pointer.

    A counter of samples moves as a pointer does, until that begins anew. So its name decides.
    """
    seen = [one.forms for one in found if one.forms or one.is_tried]
    agreed = [form for form in seen[0] if all(form in forms for forms in seen)] if seen else []
    pointers = [*dict.fromkeys(form.pointer for form in agreed if form.pointer)]
    if len(pointers) > 1:
        named = [name for name in pointers if any(word in name.lower() for word in POINTER_WORDS)]
        agreed = [form for form in agreed if [form.pointer] == named]
    return next(iter(agreed), None)


def _is_shown(form: QueueForm, tried: TriedBuffer, others: dict[BufferKey, TriedBuffer], buffer: TrackedBuffer) -> bool:
    """Whether A and then B leave a queue with the rows of A and then of B."""
    pointer = others.get(BufferKey(buffer.module, form.pointer))
    if form.kind == "ring" and pointer is None:
        return False
    blocks: list[Tensor] = []
    for value, end in ((tried.first, None if pointer is None else pointer.first),
                       (tried.second, None if pointer is None else pointer.second)):  # fmt: skip
        start = None if pointer is None else pointer.start
        nums = [num for seen, num in find_queue(tried.start, value, _one_pointer(form, start, end))
                if (seen.kind, seen.dim, seen.pointer) == (form.kind, form.dim, form.pointer)]  # fmt: skip
        if not nums:
            return False
        blocks.append(written_rows(form, value, nums[0], start))
    merged = merged_queue(form, tried.start, blocks, None if pointer is None else pointer.start)
    return torch.equal(merged, tried.both)


def _one_pointer(form: QueueForm, start: Tensor | None, end: Tensor | None) -> dict[str, tuple[Tensor, Tensor]]:
    return {} if start is None or end is None else {form.pointer: (start, end)}
