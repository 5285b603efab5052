"""Pipeline schedules as data: for every worker, the list of actions that it does in a step, in their order.

A model is cut into stages 0, 1, ...; stage s lives on worker s % num_workers. Each micro-batch goes forwards through
all stages and backwards through all of them. A schedule says in which order a worker takes up its share, and nothing
else: what has to be sent follows from the actions, and when things happen follows from what they cost (`timeline`).

  gpipe         all forwards, then all backwards (Huang et al., "GPipe", 2019)
  1f1b          one forward, one backward: at most as many micro-batches in flight as there are stages to come
                (Narayanan et al., "PipeDream", 2019; with a flush as in "PipeDream-2BW", 2021)
  interleaved   1f1b with several stages on each worker, which shortens the bubble and sends more
                (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", 2021)
  zero-bubble   1f1b whose backward comes in two actions; the weights' part, which no other stage waits for, fills the
  bubble
                (ZB-H1 of Qi et al., "Zero Bubble Pipeline Parallelism", 2023)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import NamedTuple

__all__ = [
    "BACKWARD",
    "BACKWARD_INPUT",
    "BACKWARD_WEIGHT",
    "FORWARD",
    "SCHEDULES",
    "Action",
    "Pipeline",
    "StageMessage",
    "build",
    "in_flight_bound",
    "made",
    "messages",
    "needed",
    "peak_in_flight",
    "problems",
    "proofs",
]

FORWARD = "F"
BACKWARD = "B"  # of inputs and weights at once
BACKWARD_INPUT = "I"
BACKWARD_WEIGHT = "W"


class Action(NamedTuple):
    """One micro-batch's forward or backward through one stage; as text "2F0": stage 2, forward, micro-batch 0."""

    stage: int
    kind: str
    micro: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro}"


class StageMessage(NamedTuple):
    """What one action makes and another one needs: the values of a cut (kind "F") or their gradients (kind "B").

    `by` and `to` are stages; the message belongs to micro-batch `micro`.
    """

    kind: str
    by: int
    to: int
    micro: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """A schedule: `orders[w]` is what worker w does."""

    name: str
    num_workers: int
    num_micro: int
    stages_per_worker: int
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_stages(self) -> int:
        return self.num_workers * self.stages_per_worker

    def worker_of(self, stage: int) -> int:
        return stage % self.num_workers

    def stages_of(self, worker_index: int) -> tuple[int, ...]:
        return tuple(range(worker_index, self.num_stages, self.num_workers))


def build(name: str, *, num_workers: int, num_micro: int, stages_per_worker: int = 1) -> Pipeline:
    """Return the schedule called `name`; raises ValueError where the name or a number is not legal."""
    if name not in SCHEDULES:
        raise ValueError(f"the pipeline schedule {name!r} is not known. Use one of: {', '.join(SCHEDULES)}.")
    if min(num_workers, num_micro, stages_per_worker) < 1:
        raise ValueError(
            f"a pipeline of {num_workers} workers, {num_micro} micro-batches and {stages_per_worker} stages on each "
            "worker cannot be: each of the three must be at least 1."
        )
    if stages_per_worker > 1 and name != "interleaved":
        raise ValueError(
            f"the schedule {name!r} has one stage on each worker, not {stages_per_worker}. "
            "Use schedule='interleaved', or stages_per_worker=1."
        )
    order = SCHEDULES[name]
    return Pipeline(
        name=name,
        num_workers=num_workers,
        num_micro=num_micro,
        stages_per_worker=stages_per_worker,
        orders=tuple(tuple(order(w, num_workers, num_micro, stages_per_worker)) for w in range(num_workers)),
    )


def _gpipe(worker_index: int, num_workers: int, num_micro: int, _: int) -> Iterator[Action]:
    for kind in (FORWARD, BACKWARD):
        for micro in range(num_micro):
            yield Action(worker_index, kind, micro)


def _one_f_one_b(worker_index: int, num_workers: int, num_micro: int, _: int) -> Iterator[Action]:
    warm_up = min(num_micro, num_workers - 1 - worker_index)
    for micro in range(warm_up):
        yield Action(worker_index, FORWARD, micro)
    for micro in range(num_micro):
        if micro + warm_up < num_micro:
            yield Action(worker_index, FORWARD, micro + warm_up)
        yield Action(worker_index, BACKWARD, micro)


def _zero_bubble(worker_index: int, num_workers: int, num_micro: int, _: int) -> Iterator[Action]:
    """1f1b, where the weights' part comes `worker_index` micro-batches late.

    A later worker has fewer micro-batches in flight, so it can afford to keep more of them for the end, where it would
    have nothing to do.
    """
    late = worker_index
    for action in _one_f_one_b(worker_index, num_workers, num_micro, 1):
        if action.kind == FORWARD:
            yield action
        else:
            yield action._replace(kind=BACKWARD_INPUT)
            if action.micro >= late:
                yield Action(worker_index, BACKWARD_WEIGHT, action.micro - late)
    for micro in range(max(0, num_micro - late), num_micro):
        yield Action(worker_index, BACKWARD_WEIGHT, micro)


def _interleaved(worker_index: int, num_workers: int, num_micro: int, stages_per_worker: int) -> Iterator[Action]:
    """Micro-batches go in rounds of about one per worker, each round through all of a worker's stages.

    Megatron's schedule needs num_micro to be a multiple of num_workers. Here rounds differ in size by at most one, the
    larger ones first, so that any number goes.
    """
    rounds = list(_rounds(num_workers, num_micro))
    stages = range(worker_index, num_workers * stages_per_worker, num_workers)
    forwards = [(stage, micro) for members in rounds for stage in stages for micro in members]
    backwards = [(stage, micro) for members in rounds for stage in reversed(stages) for micro in members]
    warm_up = _interleaved_warm_up(worker_index, num_workers, num_micro, stages_per_worker)
    for stage, micro in forwards[:warm_up]:
        yield Action(stage, FORWARD, micro)
    for done, (stage, micro) in enumerate(backwards):
        if warm_up + done < len(forwards):
            next_stage, next_micro = forwards[warm_up + done]
            yield Action(next_stage, FORWARD, next_micro)
        yield Action(stage, BACKWARD, micro)


def _interleaved_warm_up(worker_index: int, num_workers: int, num_micro: int, stages_per_worker: int) -> int:
    largest_round = len(next(_rounds(num_workers, num_micro)))
    warm_up = (stages_per_worker - 1) * largest_round + 2 * (num_workers - 1 - worker_index)
    return min(warm_up, num_micro * stages_per_worker)


def _rounds(num_workers: int, num_micro: int) -> Iterator[range]:
    num_rounds = max(1, num_micro // num_workers)
    least, larger = divmod(num_micro, num_rounds)
    start = 0
    for index in range(num_rounds):
        stop = start + least + (index < larger)
        yield range(start, stop)
        start = stop


SCHEDULES: dict[str, Callable[[int, int, int, int], Iterator[Action]]] = {
    "gpipe": _gpipe,
    "1f1b": _one_f_one_b,
    "interleaved": _interleaved,
    "zero-bubble": _zero_bubble,
}


def needed(action: Action, num_stages: int) -> StageMessage | None:
    """What `action` cannot begin without; None for the first stage's forward, the last one's backward, and weights."""
    stage, kind, micro = action
    if kind == FORWARD and stage > 0:
        return StageMessage(FORWARD, stage - 1, stage, micro)
    if kind in (BACKWARD, BACKWARD_INPUT) and stage < num_stages - 1:
        return StageMessage(BACKWARD, stage + 1, stage, micro)
    return None


def made(action: Action, num_stages: int) -> StageMessage | None:
    """What `action` makes for a neighbouring stage, if anything."""
    stage, kind, micro = action
    if kind == FORWARD and stage < num_stages - 1:
        return StageMessage(FORWARD, stage, stage + 1, micro)
    if kind in (BACKWARD, BACKWARD_INPUT) and stage > 0:
        return StageMessage(BACKWARD, stage, stage - 1, micro)
    return None


def messages(pipeline: Pipeline, source: int, target: int) -> tuple[StageMessage, ...]:
    """All that worker `source` sends to worker `target`, in the order in which it is sent."""
    sent = (made(action, pipeline.num_stages) for action in pipeline.orders[source])
    return tuple(message for message in sent if message and pipeline.worker_of(message.to) == target)


def proofs(pipeline: Pipeline, worker_index: int) -> dict[StageMessage, StageMessage]:
    """For what `worker_index` sends: the first answer from the same peer that proves it to have been received.

    A peer sends the answer after the action that needed the message. So a sender never has to wait for a send: it looks
    at it when the answer is there. The last ones have no answer.
    """
    found: dict[StageMessage, StageMessage] = {}
    for peer in range(pipeline.num_workers):
        waiting: list[StageMessage] = []
        for action in pipeline.orders[peer] if peer != worker_index else ():
            message = needed(action, pipeline.num_stages)
            if message and pipeline.worker_of(message.by) == worker_index:
                waiting.append(message)
            answer = made(action, pipeline.num_stages)
            if answer and pipeline.worker_of(answer.to) == worker_index:
                found.update(dict.fromkeys(waiting, answer))
                waiting = []
    return found


def in_flight_bound(pipeline: Pipeline, worker_index: int) -> int:
    """Most (stage, micro-batch) pairs whose activations the worker keeps at once, by the schedule's promise.

    gpipe: all m. 1f1b: n - w, for worker w of n. zero-bubble: n on all workers, no more than 1f1b's first. interleaved:
    its warm-up and one. Never more than there are.
    """
    every = pipeline.num_micro * pipeline.stages_per_worker
    if pipeline.name == "1f1b":
        return min(every, pipeline.num_workers - worker_index)
    if pipeline.name == "zero-bubble":
        return min(every, pipeline.num_workers)
    if pipeline.name == "interleaved":
        warm_up = _interleaved_warm_up(
            worker_index, pipeline.num_workers, pipeline.num_micro, pipeline.stages_per_worker
        )
        return min(every, warm_up + 1)
    return every


def peak_in_flight(order: tuple[Action, ...]) -> int:
    """Most activations kept at once by a worker with this order: from the forward to the end of the whole backward."""
    kept = peak = 0
    for action in order:
        kept += {FORWARD: 1, BACKWARD: -1, BACKWARD_WEIGHT: -1}.get(action.kind, 0)
        peak = max(peak, kept)
    return peak


def problems(pipeline: Pipeline) -> list[str]:
    """Everything that is wrong with a schedule; empty when it is proved right.

    Proved: each action comes once, on the worker that has its stage; a backward comes after its forward and a weights'
    part after its inputs' part; the workers together come to the end when each takes its actions strictly in order and
    messages of a pair of workers arrive in the order in which they were sent; activations stay within the bound.
    """
    found = [*_wrong_actions(pipeline), *_wrong_order(pipeline)]
    if not found:
        found += _stuck(pipeline)
    for worker_index, order in enumerate(pipeline.orders):
        peak, bound = peak_in_flight(order), in_flight_bound(pipeline, worker_index)
        if peak > bound:
            found.append(f"worker {worker_index} keeps {peak} activations at once, more than {bound}")
    return found


def _wrong_actions(pipeline: Pipeline) -> Iterator[str]:
    for worker_index, order in enumerate(pipeline.orders):
        split = any(action.kind == BACKWARD_INPUT for action in order)
        kinds = (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if split else (FORWARD, BACKWARD)
        expected = {
            Action(stage, kind, micro)
            for stage in pipeline.stages_of(worker_index)
            for kind in kinds
            for micro in range(pipeline.num_micro)
        }
        if missing := expected.difference(order):
            yield f"worker {worker_index} lacks {min(missing)}"
        if foreign := set(order) - expected:
            yield f"worker {worker_index} has {min(foreign)}, which is not its own"
        if len(order) != len(set(order)):
            yield f"worker {worker_index} does an action twice"


def _wrong_order(pipeline: Pipeline) -> Iterator[str]:
    before = {BACKWARD: FORWARD, BACKWARD_INPUT: FORWARD, BACKWARD_WEIGHT: BACKWARD_INPUT}
    for order in pipeline.orders:
        seen: set[Action] = set()
        for action in order:
            seen.add(action)
            former = before.get(action.kind)
            if former and action._replace(kind=former) not in seen:
                yield f"{action} comes before {action._replace(kind=former)}"


def _stuck(pipeline: Pipeline) -> list[str]:
    """Simulate all workers at once; a worker that cannot continue is reported with the action before which it waits."""
    done = [0] * pipeline.num_workers
    there: set[StageMessage] = set()
    waiting_for: dict[StageMessage, int] = {}
    able = list(range(pipeline.num_workers))
    while able:
        worker_index = able.pop()
        order = pipeline.orders[worker_index]
        while done[worker_index] < len(order):
            action = order[done[worker_index]]
            message = needed(action, pipeline.num_stages)
            if message and message not in there:
                waiting_for[message] = worker_index
                break
            done[worker_index] += 1
            sent = made(action, pipeline.num_stages)
            if sent:
                there.add(sent)
                if sent in waiting_for:
                    able.append(waiting_for.pop(sent))
    return [
        f"worker {worker_index} waits for ever before {order[count]}"
        for worker_index, (order, count) in enumerate(zip(pipeline.orders, done, strict=True))
        if count < len(order)
    ]
