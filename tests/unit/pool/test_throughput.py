"""How speed grows with replicas is fitted to what was measured, hopeful where nothing was."""

from __future__ import annotations

import pytest

from paceline.pool.throughput import Throughput


def test_a_run_that_was_not_measured_is_taken_to_share_all_its_work_up_to_twice_what_it_has_had() -> None:
    new = Throughput({})
    assert [new.speedup(n) for n in (0, 1, 2, 4)] == [0, 1, 2, 2]
    one = Throughput({2: 0.5})
    assert one.step_s(1) == pytest.approx(1.0)
    assert [one.speedup(n) for n in (1, 2, 4, 8)] == pytest.approx([1, 2, 4, 4])


def test_two_sizes_tell_what_is_shared_from_what_is_not() -> None:
    found = Throughput({1: 1.0, 2: 0.6, 4: 0.4})  # 0.8 / n + 0.2
    assert [found.step_s(n) for n in (1, 2, 4, 8)] == pytest.approx([1.0, 0.6, 0.4, 0.3])
    assert found.speedup(8) == pytest.approx(1 / 0.3)


def test_noise_makes_no_speed_out_of_nothing() -> None:
    slower = Throughput({1: 1.0, 2: 1.3})
    assert slower.speedup(2) == pytest.approx(1.0)
    faster = Throughput({1: 1.0, 2: 0.45})  # more than twice as fast
    assert faster.speedup(2) == pytest.approx(2.0)
    assert Throughput({1: 0.0}).speedup(2) == 2.0, "a step of no time was not measured"


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e5])
def test_the_fit_does_not_depend_on_the_unit(scale: float) -> None:
    found = Throughput({n: scale * (3 / n + 1) for n in (1, 3, 6)})
    assert found.speedup(6) == pytest.approx(4 / 1.5)
