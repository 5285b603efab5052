"""All-reduce schedules are right for 1 to 64 workers and any number of chunks, and cost what the papers say."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import quick
from paceline.schedule.allreduce.build import ALGORITHMS, FLAT, build, num_chunks_of
from paceline.schedule.allreduce.correctness_proof import problems
from paceline.schedule.allreduce.cost_model import LinkCost, NetworkCost, predict, seconds
from paceline.schedule.allreduce.rounds import Schedule, Send, draw
from paceline.schedule.allreduce.tree import parents

SLOW = LinkCost(latency_s=0.02, bytes_per_s=1e8)


def apart(num_workers: int, link: LinkCost = SLOW) -> NetworkCost:
    """Every worker is on a host of its own, and adds at once."""
    return NetworkCost(hosts=tuple(range(num_workers)), between=link, adds_bytes_per_s=math.inf)


@pytest.mark.parametrize("name", FLAT)
def test_schedules_are_right_for_1_to_64_workers(name: str) -> None:
    for num_workers in quick.some(range(1, 65), step=5):
        for num_chunks in {1, 5, num_workers if name != "tree" else 2}:
            assert problems(build(name, num_workers=num_workers, num_chunks=num_chunks)) == [], (
                num_workers,
                num_chunks,
            )


def test_hierarchical_schedules_are_right_for_1_to_64_workers_on_even_and_uneven_hosts() -> None:
    for num_workers in quick.some(range(1, 65), step=5):
        for num_hosts in (1, 3, 8):
            evenly = tuple(worker * num_hosts // num_workers for worker in range(num_workers))
            crooked = tuple(worker * worker % num_hosts for worker in range(num_workers))
            for hosts in {evenly, crooked}:
                schedule = build("hierarchical", num_workers=num_workers, num_chunks=9, hosts=hosts)
                assert problems(schedule) == [], hosts


@settings(max_examples=quick.examples(60), deadline=None)
@given(
    name=st.sampled_from(ALGORITHMS),
    hosts=st.lists(st.integers(0, 5), min_size=1, max_size=24),
    num_chunks=st.integers(1, 90),
)
def test_schedules_are_right_for_any_number_of_chunks_and_any_hosts(
    name: str, hosts: list[int], num_chunks: int
) -> None:
    schedule = build(name, num_workers=len(hosts), num_chunks=num_chunks, hosts=tuple(hosts))
    assert problems(schedule) == []


def of_rounds(*rounds: tuple[Send, ...], num_workers: int = 2, num_chunks: int = 1) -> Schedule:
    return Schedule(name="made up", num_workers=num_workers, num_chunks=num_chunks, rounds=rounds)


def plus(source: int, target: int, first: int = 0, stop: int = 1) -> Send:
    return Send(source, target, first, stop, True)


def equals(source: int, target: int, first: int = 0, stop: int = 1) -> Send:
    return Send(source, target, first, stop, False)


@pytest.mark.parametrize(
    "schedule, says",
    [
        (of_rounds((plus(0, 1),)), "worker 0 ends without the contribution of worker 1 to 0"),
        (of_rounds((plus(0, 1),), (plus(0, 1),)), "round 1: 0>1 +0 adds to chunk 0 what is in it: the contribution"),
        (of_rounds((equals(0, 1),)), "round 0: 0>1 =0 takes from chunk 0 the contribution of worker 1"),
        (of_rounds((plus(0, 1), plus(1, 0))), "round 0: 0>1 +0 reads chunk 0 of worker 0, which 1>0 +0 writes"),
        (
            of_rounds((plus(0, 2), plus(1, 2)), num_workers=3),
            "round 0: 1>2 +0 and 0>2 +0 both write chunk 0 of worker 2",
        ),
        (of_rounds((plus(0, 1), plus(0, 1, 1, 2)), num_chunks=2), "round 0: worker 0 sends twice"),
        (
            of_rounds((plus(0, 2), plus(1, 2, 1, 2)), num_workers=3, num_chunks=2),
            "round 0: worker 2 receives twice",
        ),
        (of_rounds((plus(0, 2),)), "round 0: 0>2 +0 is not from one of 2 workers to another"),
        (of_rounds((plus(0, 1, 1, 2),)), "round 0: 0>1 +1 has none of the 1 chunks, or others"),
    ],
)
def test_the_checker_finds_what_is_wrong(schedule: Schedule, says: str) -> None:
    assert problems(schedule)[0].startswith(says)


def test_the_checker_finds_sums_that_are_equal_but_for_their_bits() -> None:
    # Workers 0 and 3 have a + d; one adds b and then c, the other one c and then b.
    sends = [plus(3, 0), equals(0, 3), plus(1, 0), plus(2, 0), plus(2, 3), plus(1, 3), equals(0, 1), equals(3, 2)]
    found = problems(of_rounds(*((send,) for send in sends), num_workers=4))
    assert found == [f"worker {worker} has summed chunk 0 in another order than worker 0" for worker in (2, 3)]
    sends = [plus(3, 0), plus(1, 0), plus(2, 0), equals(0, 1), equals(0, 2), equals(0, 3)]
    assert problems(of_rounds(*((send,) for send in sends), num_workers=4)) == []


@pytest.mark.parametrize("num_workers", quick.some(range(2, 65), step=6))
def test_workers_inside_of_one_tree_are_leaves_of_the_other(num_workers: int) -> None:
    first, second = parents(num_workers)
    assert not set(first) & set(second) - {None}
    for above in (first, second):
        assert above.count(None) == 1
        assert max(above.count(worker) for worker in range(num_workers)) <= 2
        depths = [_depth(above, worker) for worker in range(num_workers)]
        assert max(depths) <= math.log2(num_workers)


def _depth(above: tuple[int | None, ...], worker: int) -> int:
    parent = above[worker]
    return 0 if parent is None else 1 + _depth(above, parent)


@pytest.mark.parametrize("num_workers", [2, 3, 4, 7, 8, 16])
def test_rings_and_halving_send_the_least_there_is_and_others_at_most_as_promised(num_workers: int) -> None:
    num_chunks = 4 * num_workers
    for name in FLAT:
        schedule = build(name, num_workers=num_workers, num_chunks=num_chunks)
        sent = [0] * num_workers
        for send in (send for sends in schedule.rounds for send in sends):
            sent[send.source] += send.stop - send.first
        if name == "ring" or (name == "halving" and num_workers & (num_workers - 1) == 0):
            assert set(sent) == {2 * (num_workers - 1) * num_chunks // num_workers}
        else:  # of other numbers than powers of two, halving also sends a whole tensor to a partner
            assert max(sent) <= (3 if name == "halving" else 2) * num_chunks, name


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 8, 16])
def test_a_ring_costs_what_its_formula_says(num_workers: int) -> None:
    num_bytes = 1e6
    told = seconds(
        build("ring", num_workers=num_workers, num_chunks=num_workers), num_bytes=num_bytes, network=apart(num_workers)
    )
    each = SLOW.latency_s + num_bytes / num_workers / SLOW.bytes_per_s
    assert told == pytest.approx(2 * (num_workers - 1) * each)


@pytest.mark.parametrize("num_workers", [2, 4, 8, 16, 32])
def test_halving_and_doubling_costs_what_its_formula_says(num_workers: int) -> None:
    num_bytes = 1e6
    told = seconds(
        build("halving", num_workers=num_workers, num_chunks=num_workers),
        num_bytes=num_bytes,
        network=apart(num_workers),
    )
    moved_s = 2 * (num_workers - 1) / num_workers * num_bytes / SLOW.bytes_per_s
    assert told == pytest.approx(2 * math.log2(num_workers) * SLOW.latency_s + moved_s)


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5, 8, 16, 33])
def test_trees_cost_two_ways_through_them_and_at_most_a_third_more_than_twice_the_tensor(num_workers: int) -> None:
    latency_only = apart(num_workers, LinkCost(latency_s=1.0, bytes_per_s=math.inf))
    depth = max(_depth(above, worker) for above in parents(num_workers) for worker in range(num_workers))
    small = build("tree", num_workers=num_workers, num_chunks=2)
    assert seconds(small, num_bytes=8, network=latency_only) == 2 * depth
    bytes_only = apart(num_workers, LinkCost(latency_s=0.0, bytes_per_s=1.0))
    large = build("tree", num_workers=num_workers, num_chunks=64)
    assert seconds(large, num_bytes=64, network=bytes_only) <= 2 * 64 * 4 / 3 + 4 * depth


def test_one_port_is_shared_by_all_workers_of_a_host() -> None:
    inside = LinkCost(latency_s=0.0, bytes_per_s=math.inf)
    shared = NetworkCost(hosts=(0, 0, 1, 1), between=LinkCost(latency_s=0.0, bytes_per_s=1.0), inside=inside)
    both = Schedule(name="two at once", num_workers=4, num_chunks=2, rounds=((plus(0, 2), plus(1, 3)),))
    assert seconds(both, num_bytes=2, network=shared) == pytest.approx(2, rel=1e-6)
    assert seconds(both, num_bytes=2, network=dataclasses.replace(shared, hosts=(0, 1, 2, 3))) == pytest.approx(1)
    near = dataclasses.replace(shared, hosts=(0, 0, 0, 0))
    assert seconds(both, num_bytes=2, network=near) < 1e-6
    with pytest.raises(ValueError, match="the network has 3 workers and the schedule 4"):
        seconds(both, num_bytes=2, network=dataclasses.replace(shared, hosts=(0, 1, 2)))


def test_the_price_says_which_algorithm_is_for_what() -> None:
    def cheapest(num_bytes: int, hosts: tuple[int, ...]) -> str:
        network = NetworkCost(hosts=hosts, between=LinkCost(latency_s=1e-3, bytes_per_s=1e9))
        return min(ALGORITHMS, key=lambda name: predict(name, num_bytes=num_bytes, network=network))

    assert cheapest(4096, tuple(range(7))) == "tree"
    assert cheapest(64 << 20, tuple(range(7))) == "ring"
    assert cheapest(64 << 20, tuple(worker // 4 for worker in range(16))) == "hierarchical"


def test_large_tensors_are_cut_into_more_chunks_and_none_into_more_than_is_of_use() -> None:
    assert [num_chunks_of("ring", num_bytes=size, num_workers=4) for size in (0, 4096, 8 << 20, 1 << 40)] == [
        4,
        4,
        16,
        64,
    ]
    assert num_chunks_of("tree", num_bytes=4096, num_workers=4) == 2


def test_schedules_are_drawn() -> None:
    assert draw(build("ring", num_workers=3, num_chunks=3), most_rounds=3).splitlines() == [
        "ring: 3 workers, 3 chunks, 4 rounds",
        "(+3>1: sends chunk 3 to worker 1, which adds it; =3>1: which puts it in the place of its own)",
        "round  worker 0  worker 1  worker 2",
        "0      +0>1      +1>2      +2>0",
        "1      +2>1      +0>2      +1>0",
        "2      =1>1      =2>2      =0>0",
        "... and 1 more",
    ]
    halved = draw(build("halving", num_workers=4, num_chunks=4))
    assert halved.splitlines()[3] == "0      +2-3>2    +2-3>3    +0-1>0    +0-1>1"


@pytest.mark.parametrize(
    "name, numbers, says",
    [
        ("star", {"num_workers": 2, "num_chunks": 2}, "'star' is not known. Use one of: ring, tree, halving"),
        ("ring", {"num_workers": 2, "num_chunks": 0}, "2 workers on 2 places in 0 chunks"),
        ("ring", {"num_workers": 2, "num_chunks": 2, "hosts": (0,)}, "2 workers on 1 places"),
    ],
)
def test_schedules_that_cannot_be_are_refused(name: str, numbers: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        build(name, **numbers)  # pyright: ignore[reportArgumentType]
