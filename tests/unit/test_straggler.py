"""Who is slower than the others, step after step, is named within twenty steps, with what takes it so long."""

from __future__ import annotations

from paceline.comm.ring import Work
from paceline.monitor.doing import Doing
from paceline.monitor.straggler import StragglerDetector

WITHIN = 20  # steps: the promise


class Run:
    """Workers in lock-step, looked at after every `every` steps."""

    def __init__(self, workers: int = 4, every: int = 1) -> None:
        self.detector, self._every = StragglerDetector(), every
        self._work = {worker: Work() for worker in range(workers)}
        self._delays = dict.fromkeys(range(workers), 0.0)
        self._now = 0.0
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
    ) -> list[tuple[int, str]]:
        """Take steps; returns what was said, with the number of the step. By default each computes for 0.2 s."""
        said: list[tuple[int, str]] = []
        for _ in range(count):
            self.step += 1
            own = {w: (data_s or {}).get(w, 0.01) + (compute_s or {}).get(w, 0.2) + 0.02 for w in self._work}
            slowest = max(own.values())
            self._now += slowest
            for worker, work in self._work.items():
                self._delays[worker] += (delayed or {}).get(worker, 0.0) * slowest
                self._work[worker] = Work(
                    steps=work.steps + 1,
                    micros=work.micros + (micros or {}).get(worker, 2),
                    data_s=work.data_s + (data_s or {}).get(worker, 0.01),
                    compute_s=work.compute_s + (compute_s or {}).get(worker, 0.2),
                    communication_s=work.communication_s + slowest - own[worker],
                    optimizer_s=work.optimizer_s + 0.02,
                )
            if self.step % self._every == 0:
                said += [(self.step, text) for text in self.look(slowest)]
        return said

    def look(self, step_s: float = 0.3) -> list[str]:
        return self.detector.look({worker: self._doing(worker, step_s) for worker in self._work}, self._now)

    def replace(self, worker: int) -> None:
        self._work[worker], self._delays[worker] = Work(), 0.0

    def _doing(self, worker: int, step_s: float) -> Doing:
        return Doing(
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
        "worker 3 (a, pid 4703) is 2.0x slower than the others: its compute takes 420 ms a step, theirs 200 ms"
    ]
    assert said[0][0] <= WITHIN


def test_the_sentence_ends_with_the_remedy_where_there_is_one() -> None:
    run = Run()
    run.detector = StragglerDetector(remedy="; --balance would give it fewer micro-batches")
    ((_, text),) = run.steps(WITHIN, {3: 0.42})
    assert text.endswith("theirs 200 ms; --balance would give it fewer micro-batches")


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


def test_slow_data_is_called_data() -> None:
    ((_, text),) = Run().steps(WITHIN, data_s={0: 0.5})
    assert "its data takes 500 ms a step, theirs 10.0 ms" in text


def test_with_two_workers_the_slow_one_is_named() -> None:
    ((_, text),) = Run(workers=2).steps(WITHIN, {1: 0.4})
    assert text == (
        "worker 1 (a, pid 4701) is 1.9x slower than the other: its compute takes 400 ms a step, that of the other "
        "200 ms"
    )


def test_what_the_system_takes_away_is_told() -> None:
    ((_, text),) = Run().steps(WITHIN, {3: 0.42}, delayed={3: 0.4})
    assert text.endswith("(paused by the system 40% of the time)")


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
