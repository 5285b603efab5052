"""The noise scale's estimators: exact on what is to be expected of parts, smoothed before the ratio is taken."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.sync.allreduce.replica_norms import ReplicaNorm
from paceline.worker.step.gradient_noise_scale import LEAST_STEPS, GradientNoiseScale, estimates

SIGNAL, NOISE = 3.0, 70.0  # |G|^2, and tr(S) of one sample


def expected(weights: list[float], *, scale: float, weight: float, num_samples: int) -> tuple[list[ReplicaNorm], float]:
    """What is to be expected of the squares of parts that weigh so much of `weight`, and of the mean's."""
    parts = []
    for one in weights:
        size = num_samples * one / weight
        of_mean = SIGNAL + NOISE / size if size else 0.0
        parts.append(ReplicaNorm(one, of_mean * (one / weight / scale) ** 2))
    return parts, SIGNAL + NOISE / num_samples


@given(
    weights=st.lists(st.integers(0, 40), min_size=2, max_size=9).filter(lambda some: sum(map(bool, some)) > 1),
    scale=st.floats(0.01, 100),
    tokens=st.floats(0.5, 50),
)
def test_of_what_is_to_be_expected_of_uneven_parts_they_tell_both_numbers(
    weights: list[int], scale: float, tokens: float
) -> None:
    """Parts are weighed in tokens, say, of which a sample has so many; `scale` divides by what all weigh."""
    num_samples, weight = sum(weights), sum(weights) * tokens
    parts, square = expected([one * tokens for one in weights], scale=scale, weight=weight, num_samples=num_samples)
    parts = [ReplicaNorm(part.weight, part.square) for part in parts]
    found = estimates(parts, square=square, scale=scale, weight=weight, num_samples=num_samples)
    assert found == pytest.approx((SIGNAL, NOISE), rel=1e-6)


@pytest.mark.parametrize("first", [1.0, 4.0, 15.0])
def test_the_first_micro_batch_alone_tells_them_too(first: float) -> None:
    parts, square = expected([first], scale=0.5, weight=16.0, num_samples=16)
    found = estimates(parts, square=square, scale=0.5, weight=16.0, num_samples=16)
    assert found == pytest.approx((SIGNAL, NOISE), rel=1e-9)


@pytest.mark.parametrize(
    "parts",
    [[], [ReplicaNorm(0.0, 0.0)], [ReplicaNorm(16.0, 5.0)], [ReplicaNorm(16.0, 5.0), ReplicaNorm(0.0, 0.0)]],
    ids=str,
)
def test_a_part_that_is_the_whole_batch_tells_nothing(parts: list[ReplicaNorm]) -> None:
    assert estimates(parts, square=5.0, scale=1.0, weight=16.0, num_samples=16) is None


def test_it_is_the_ratio_of_smoothed_numbers_and_waits_for_some() -> None:
    scale = GradientNoiseScale()
    for number in range(2 * LEAST_STEPS):
        assert scale.samples is None or number >= LEAST_STEPS
        swing = 1.9 if number % 2 else 0.1  # means of ratios would be far from ratios of means
        parts, square = expected([8.0, 8.0], scale=1.0, weight=16.0, num_samples=16)
        parts = [ReplicaNorm(part.weight, part.square * swing) for part in parts]
        scale.add(parts, square=square * swing, scale=1.0, weight=16.0, num_samples=16)
    assert scale.samples == pytest.approx(NOISE / SIGNAL, rel=0.02)


def test_gradients_that_are_noise_alone_or_not_finite_tell_nothing() -> None:
    scale = GradientNoiseScale()
    for _ in range(2 * LEAST_STEPS):
        scale.add([ReplicaNorm(8.0, float("inf"))] * 2, square=1.0, scale=1.0, weight=16.0, num_samples=16)
        scale.add([ReplicaNorm(8.0, 1.0)] * 2, square=None, scale=1.0, weight=16.0, num_samples=16)
        scale.add([ReplicaNorm(8.0, 1.0)] * 2, square=1.5, scale=1.0, weight=16.0, num_samples=16)
    assert scale.samples is None  # the mean is shorter than noise alone would have it
