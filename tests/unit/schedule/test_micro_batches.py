from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.schedule.micro_batches import micro_batches, split_evenly, step_ranges


@given(st.integers(0, 10_000), st.integers(1, 300), st.integers(1, 70))
def test_micro_batches_cover_the_step_once_in_even_sizes(start: int, count: int, micro: int) -> None:
    micros = micro_batches(start, start + count, micro)
    positions = [p for m in micros for p in range(m.start, m.stop)]
    assert positions == list(range(start, start + count))
    sizes = [m.num_samples for m in micros]
    assert max(sizes) <= micro and max(sizes) - min(sizes) <= 1
    assert len(micros) == -(-count // micro)
    assert [m.index for m in micros] == list(range(len(micros)))


@given(st.integers(0, 500), st.integers(1, 70))
def test_shares_cover_all_micro_batches_once_and_differ_by_at_most_one(num_micro: int, workers: int) -> None:
    shares = split_evenly(num_micro, workers)
    assert [index for share in shares for index in share] == list(range(num_micro))
    assert len(shares) == workers
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 1000), st.integers(1, 100), st.booleans(), st.data())
def test_steps_from_a_position_are_the_rest_of_the_steps_from_the_beginning(
    n: int, size: int, drop_last: bool, data: st.DataObject
) -> None:
    steps = list(step_ranges(num_samples=n, size=size, drop_last=drop_last))
    covered = steps[-1][1] if steps else 0
    assert covered == (n - n % size if drop_last else n)
    if steps:
        begin = data.draw(st.integers(0, len(steps) - 1))
        assert (
            list(step_ranges(num_samples=n, size=size, drop_last=drop_last, position=steps[begin][0])) == steps[begin:]
        )
