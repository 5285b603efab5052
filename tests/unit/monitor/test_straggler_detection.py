"""Who is slower than the others, step after step, is named within twenty steps, with what takes it so long."""

from __future__ import annotations

import math

import pytest

import quick
from paceline.comm.flight_recorder import WorkTotals
from paceline.monitor.hang.straggler_detection import LONG_S, StragglerDetector, look_interval_s
from paceline.monitor.hang.worker_activity import WorkerActivity

WITHIN, WITHIN_S = 20, 2.0  # steps, or seconds, whichever is later: the promise
POLL_S = 0.2  # supervisors look no oftener


class Run:
    """Workers in lock-step, looked at after every `every` steps; each of those takes `scale` times as long as told."""

    def __init__(self, workers: int = 4, every: int = 1, *, scale: float = 1.0) -> None:
        self.detector, self._every, self._scale = StragglerDetector(), every, scale
        self._work = {worker: WorkTotals() for worker in range(workers)}
        self._delays = dict.fromkeys(range(workers), 0.0)
        self.now = 0.0
        self.step = 0
        self.state = dict.fromkeys(range(workers), "running")

    def steps(
        self,
        count: int,
        compute_s: dict[int, float] | None = None,
        *,
        data_s: dict[int, float] | None = None,
        micros: dict[int, int] | None = None,
        delayed: dict[int, float] | None = None,
        sum_s: float = 0.0,
    ) -> list[tuple[int, str]]:
        """Take steps; returns what was said, with the number of the step. By default each computes for 0.2 s.

        `sum_s`: what the sum over workers takes when all have come.
        """
        said: list[tuple[int, str]] = []
        for _ in range(count):
            self.step += 1
            own = {w: (data_s or {}).get(w, 0.01) + (compute_s or {}).get(w, 0.2) + 0.02 for w in self._work}
            slowest = max(own.values()) + sum_s
            self.now += slowest * self._scale
            for worker, work in self._work.items():
                self._delays[worker] += (delayed or {}).get(worker, 0.0) * slowest * self._scale
                self._work[worker] = WorkTotals(
                    steps=work.steps + 1,
                    micros=work.micros + (micros or {}).get(worker, 2),
                    data_s=work.data_s + (data_s or {}).get(worker, 0.01) * self._scale,
                    compute_s=work.compute_s + (compute_s or {}).get(worker, 0.2) * self._scale,
                    communication_s=work.communication_s + (slowest - own[worker]) * self._scale,
                    optimizer_s=work.optimizer_s + 0.02 * self._scale,
                )
            if self.step % self._every == 0:
                said += [(self.step, text) for text in self.look(slowest)]
        return said

    def look(self, step_s: float = 0.3) -> list[str]:
        return self.detector.look(self.activities(step_s), self.now)

    def activities(self, step_s: float) -> dict[int, WorkerActivity]:
        return {worker: self._doing(worker, step_s * self._scale) for worker in self._work}

    def replace(self, worker: int) -> None:
        self._work[worker], self._delays[worker] = WorkTotals(), 0.0

    def _doing(self, worker: int, step_s: float) -> WorkerActivity:
        return WorkerActivity(
            worker=worker,
            host="a",
            pid=4700 + worker,
            limit_s=600.0,
            state=self.state[worker],
            step=self.step,
            steps_s=(step_s,),
            phase="",
            phase_s=0.0,
            line="",
            work=self._work[worker],
            run_delay_s=self._delays[worker],
            idle_s=0.0,
            waits_for=0,
            waited_s=0.0,
            groups=(),
            calls=(),
        )


def test_a_slow_worker_is_named_once_with_how_much_slower_and_what_takes_it_so_long() -> None:
    run = Run()
    said = run.steps(60, {3: 0.42})
    assert [text for _, text in said] == [
        "worker 3 (a, pid 4703) is 2.0x slower than the others: its compute takes 420 ms a step, theirs 200 ms "
        "(data 2% compute 93% comm 0% optim 4%)"
    ]
    assert said[0][0] <= WITHIN


def test_the_sentence_ends_with_the_remedy_where_there_is_one() -> None:
    run = Run()
    run.detector = StragglerDetector(remedy="; --balance would give it fewer micro-batches")
    ((_, text),) = run.steps(WITHIN, {3: 0.42})
    assert text.endswith("optim 4%); --balance would give it fewer micro-batches")


def test_who_becomes_slow_later_is_named_within_twenty_steps_and_taken_back() -> None:
    run = Run()
    assert run.steps(100) == []
    ((step, text),) = run.steps(40, {1: 0.4})
    assert step - 100 <= WITHIN and text.startswith("worker 1 ")
    assert [text for _, text in run.steps(40)] == ["worker 1 is as fast as the others again"]


def test_looks_that_see_several_steps_at_a_time_find_it_too() -> None:
    run = Run(every=7)
    assert run.steps(70) == []
    ((step, _),) = run.steps(70, {1: 0.4})
    assert step - 70 <= WITHIN + 7


@pytest.mark.parametrize("every", [20, 100])
def test_where_many_steps_lie_between_two_looks_it_is_named_at_the_third(every: int) -> None:
    run = Run(every=every, scale=POLL_S / (0.23 * every))
    assert run.steps(1000 // every * every) == []
    first = run.step
    ((step, text),) = run.steps(40 * every, {1: 0.4})
    assert text.startswith("worker 1 ") and "is 1.9x slower" in text
    assert (step - first) * 0.43 * POLL_S / (0.23 * every) <= WITHIN_S


@pytest.mark.parametrize("every", [20, 100])
def test_who_is_looked_at_but_seldom_is_named_when_two_looks_have_seen_it(every: int) -> None:
    """As with the workers of other hosts, which tell once a second."""
    run = Run(every=every)
    assert run.steps(10 * every) == []
    ((step, _),) = run.steps(10 * every, {1: 0.4})
    assert step - 10 * every == 2 * every


@pytest.mark.parametrize("step_s", [0.001, 0.02, 0.05, 0.08, 0.1, 0.115, 0.133, 0.18, 0.25, 0.35, 0.41, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("late", quick.some([0, 1, 3, 5], step=3))
def test_looks_come_so_often_that_it_is_named_in_time(step_s: float, late: int) -> None:
    """Who looks comes by every POLL_S; the worker becomes slow at any step between two looks."""
    run, all_slow = Run(every=1 << 30, scale=step_s / 0.43), dict.fromkeys(range(4), 0.4)

    next_at = [0.0]

    def steps(count: float, compute_s: dict[int, float]) -> list[str]:
        last, said = run.step + count, list[str]()
        while run.step < last and not said:
            run.steps(1, compute_s)
            if run.now >= next_at[0]:
                next_at[0] = run.now + math.ceil(look_interval_s(run.activities(0.43), 1.0) / POLL_S) * POLL_S - 1e-9
                said = run.look(0.43)
        return said

    assert steps(40 + 3.0 // step_s + late, all_slow) == []
    first, began = run.step, run.now
    (text,) = steps(math.inf, dict.fromkeys(range(4), 0.2) | {1: 0.4})
    assert text.startswith("worker 1 ")
    assert run.step - first <= WITHIN or run.now - began <= WITHIN_S


def test_one_hiccup_in_fast_steps_is_no_straggler() -> None:
    run = Run(every=20, scale=0.05)
    run.steps(400)
    assert run.steps(1, {2: 40.0}) + run.steps(400) == []


def test_communication_that_is_most_of_a_step_for_everybody_is_told_of_all_and_once() -> None:
    run = Run()
    said = run.steps(100, sum_s=0.3)
    assert [text for _, text in said] == [
        "communication takes 57% of a step, or more, on every worker: 300 ms of 530 ms on worker 0, which waits least "
        "for the others"
    ]
    assert said[0][0] * 0.53 >= LONG_S


def test_long_waits_for_one_worker_are_no_communication_of_all() -> None:
    ((_, text),) = Run().steps(100, {3: 2.0}, sum_s=0.1)
    assert text.startswith("worker 3 ") and "its compute takes" in text


def test_slow_data_is_called_data() -> None:
    ((_, text),) = Run().steps(WITHIN, data_s={0: 0.5})
    assert "its data takes 500 ms a step, theirs 10.0 ms" in text


def test_with_two_workers_the_slow_one_is_named() -> None:
    ((_, text),) = Run(workers=2).steps(WITHIN, {1: 0.4})
    assert text == (
        "worker 1 (a, pid 4701) is 1.9x slower than the other: its compute takes 400 ms a step, that of the other "
        "200 ms (data 2% compute 93% comm 0% optim 5%)"
    )


def test_what_the_system_takes_away_is_told() -> None:
    ((_, text),) = Run().steps(WITHIN, {3: 0.42}, delayed={3: 0.4})
    assert text.endswith("optim 4%; paused by the system 40% of the time)")


def test_a_worker_that_is_stopped_again_and_again_is_paused_by_the_system() -> None:
    run, said = Run(), list[tuple[int, str]]()
    for step in range(WITHIN):
        run.state[2] = "stopped" if step % 2 else "running"
        said += run.steps(1, {2: 0.42})
    ((_, text),) = said
    assert text.startswith("worker 2 ") and "paused by the system 50% of the time" in text


def test_a_hiccup_is_no_straggler() -> None:
    run = Run()
    run.steps(30)
    assert run.steps(1, {2: 5.0}) == []
    assert run.steps(30) == []


def test_who_has_more_micro_batches_is_not_slower() -> None:
    assert Run().steps(60, {0: 0.4}, micros={0: 4}) == []


def test_a_difference_that_costs_little_is_not_told() -> None:
    """A step of 1 s, and 2 ms of it more on one worker: waiting for something else is most of it."""
    run = Run()
    for _ in range(40):
        run.steps(1, dict.fromkeys(range(4), 0.001) | {1: 0.012})
        assert run.look(step_s=1.0) == []


def test_nobody_is_judged_in_the_first_steps_of_its_own_or_alone() -> None:
    assert Run().steps(8, {1: 2.0}) == []
    assert Run(workers=1).steps(60) == []


def test_a_replacement_is_judged_by_its_own_steps() -> None:
    run = Run()
    run.steps(30)
    run.replace(2)
    assert run.steps(10, {2: 0.9}) == []
    assert [text[:9] for _, text in run.steps(WITHIN, {2: 0.9})] == ["worker 2 "]


def test_a_worker_whose_fellows_have_all_just_come_is_compared_with_nobody() -> None:
    """One of them has steps in one half of the window only, the other in the other half."""
    run = Run(workers=3)
    run.steps(2 * WITHIN)
    for _ in range(8):
        for worker in (1, 2):
            run.replace(worker)
            run.steps(6, {0: 0.9})
            for text in run.look():
                assert "worker 0" in text


def test_a_worker_that_comes_and_goes_has_few_lines_and_each_beginning_has_an_end() -> None:
    run = Run()
    said: list[tuple[int, str]] = []
    for _ in range(20):  # slow for 6 s, fine for 6 s, for four minutes
        said += run.steps(14, {1: 0.42})
        said += run.steps(30)
    texts = [text for _, text in said]
    begins = [number for number, text in enumerate(texts) if "slower than the others" in text]
    ends = [number for number, text in enumerate(texts) if "as fast as the others again" in text]
    assert begins == list(range(0, len(texts), 2)) and ends == list(range(1, len(texts), 2))
    assert 2 <= len(texts) <= 8, texts


def test_where_the_machine_is_shared_out_no_worker_is_named() -> None:
    run = Run()
    assert run.steps(100, {1: 0.42}, delayed=dict.fromkeys(range(4), 0.5)) == []
    assert run.steps(40, {1: 0.42}, delayed={1: 0.5}), "one alone that waits for a core is named, with that share"
