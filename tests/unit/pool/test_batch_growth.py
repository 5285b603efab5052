"""A run's batch grows with its replicas as far as the gradient noise scale says that it pays, and within its bounds."""

from __future__ import annotations

import pytest

from paceline.errors import PlanError
from paceline.pool.batch_growth import BatchGrowth, parsed_growth
from paceline.pool.run_control import NewestSteps
from paceline.pool.run_pace import RunPace
from paceline.pool.throughput import Throughput

GROWTH = BatchGrowth(least=64, most=512, micro=8)
HALF_SHARED = Throughput({1: 1.0, 2: 0.75, 4: 0.625})  # 0.5 / n + 0.5


def of_noise(noise_scale: float | None, *, batch: int = 64, fewest: int = 1) -> RunPace:
    return RunPace(
        throughput=HALF_SHARED, fewest=fewest, samples_s=0.5, growth=GROWTH, noise_scale=noise_scale, batch=batch
    )


def test_a_replica_never_has_more_samples_than_on_the_fewest() -> None:
    assert [GROWTH.sizes(n, fewest=1)[-1] for n in (1, 2, 3, 4, 8, 16)] == [64, 128, 128, 256, 512, 512]
    assert [GROWTH.sizes(n, fewest=2)[-1] for n in (2, 4, 8)] == [64, 128, 256]


def test_with_much_noise_it_grows_and_without_it_stays() -> None:
    assert [of_noise(1e6).best_batch(n) for n in (1, 2, 4)] == [64, 128, 256]
    assert [of_noise(1.0).best_batch(n) for n in (1, 2, 4)] == [64, 64, 64]


def test_as_long_as_the_noise_is_unknown_it_only_shrinks_where_it_must() -> None:
    assert of_noise(None).best_batch(4) == 64
    assert of_noise(None, batch=256).best_batch(4) == 256
    assert of_noise(None, batch=256).best_batch(2) == 128


def test_a_gain_of_less_than_a_tenth_is_not_worth_a_start() -> None:
    # On 2 replicas 64 samples take 0.75 s, and 128 take 1 s: 1.5 times as many in a second, times the efficiency.
    def gain(noise: float) -> float:
        return 2 * 0.75 * (noise + 64) / (noise + 128)

    assert gain(100.0) > 1.05
    assert gain(100.0) < 1.1
    assert of_noise(100.0).best_batch(2) == 64
    assert gain(200.0) > 1.1
    assert of_noise(200.0).best_batch(2) == 128
    assert of_noise(100.0, batch=128).best_batch(2) == 128, "nor is going back"


def test_the_pace_counts_what_samples_bring() -> None:
    assert of_noise(1e9).pace(2) == pytest.approx(2.0), "twice the samples in the same second, and each as good"
    assert of_noise(0.001).pace(2) == pytest.approx(1 / 0.75, rel=1e-3), "the batch stays: as without growth"
    assert RunPace(throughput=HALF_SHARED, fewest=1).pace(2) == pytest.approx(1 / 0.75)
    assert of_noise(1e9).pace(0) == 0.0


def test_a_step_of_a_larger_batch_tells_what_one_of_the_least_takes() -> None:
    took = NewestSteps(total_s=1.0, samples_s=0.8)  # four times the least batch, on 2 replicas
    step_s, samples_s = took.on_least(scale=4.0, replicas=2)
    assert step_s == pytest.approx(0.4)
    assert samples_s == pytest.approx(0.4)
    assert took.on_least(scale=1.0, replicas=2) == (1.0, 1.6)


def test_a_change_is_said_in_one_sentence() -> None:
    assert of_noise(1e4).gain_text("bert-1", 4, 64) == (
        "bert-1 goes from batches of 64 samples to 256 on 4 replicas: at a gradient noise scale of about 10,000 "
        "samples, a second brings 2.5 times as much"
    )
    assert "with fewer replicas" in of_noise(1e4, batch=256).gain_text("bert-1", 1, 256)


@pytest.mark.parametrize("text", ["64", "127", "many", ""])
def test_a_bound_that_allows_no_doubling_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--batch-grows"):
        parsed_growth(text, size=64, micro=8)
    assert parsed_growth("128", size=64, micro=8) == BatchGrowth(least=64, most=128, micro=8)
