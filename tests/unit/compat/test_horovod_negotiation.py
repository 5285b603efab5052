"""The machine that decides what Horovod programs run next, driven without processes."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.compat.horovod.negotiation import Negotiation
from paceline.compat.horovod.requests import Kind, OpRequest, OpVerdict, Reduction, decoded, encoded

LARGE = 1 << 30


def request(name: str, kind: str = Kind.ALLREDUCE, **more: object) -> OpRequest:
    fields: dict[str, object] = {"dtypes": ("float32",), "shapes": ((4, 2),)}
    return OpRequest(name=name, kind=kind, **(fields | more))  # pyright: ignore[reportArgumentType]


def submit(
    machine: Negotiation, rank: int, *requests: OpRequest, now: float = 0.0
) -> list[tuple[OpVerdict, tuple[int, ...]]]:
    machine.submit(rank, requests, now=now)
    return machine.decide()


def added(machine: Negotiation, size: int, ranks: tuple[int, ...]) -> int:
    """Have all ranks add a process set; returns its number."""
    one = request("add", Kind.ADD_SET, ranks=ranks, dtypes=(), shapes=())
    return [submit(machine, rank, one) for rank in range(size)][-1][0][0].value


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_operation_runs_once_and_in_one_order_whatever_the_order_of_the_calls(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 5))
    names = [f"op{number}" for number in range(data.draw(st.integers(1, 12)))]
    machine = Negotiation(range(size), fusion_bytes=data.draw(st.sampled_from([0, 64, LARGE])))
    left = {rank: list(data.draw(st.permutations(names))) for rank in range(size)}
    heard: defaultdict[int, list[str]] = defaultdict(list)
    while any(left.values()):
        rank = data.draw(st.sampled_from([rank for rank in left if left[rank]]))
        count = data.draw(st.integers(1, len(left[rank])))
        now, left[rank] = left[rank][:count], left[rank][count:]
        for verdict, ranks in submit(machine, rank, *map(request, now)):
            assert not verdict.error
            for one in ranks:
                heard[one] += verdict.names
    assert Counter(heard[0]) == Counter(names)
    assert all(heard[rank] == heard[0] for rank in range(size))


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_overlapping_process_sets_follow_one_order(data: st.DataObject) -> None:
    size = 4
    machine = Negotiation(range(size), fusion_bytes=LARGE)
    sets = {0: tuple(range(size))}
    for ranks in ((0, 1, 2), (1, 3)):
        sets[added(machine, size, ranks)] = ranks
    assert sorted(sets) == [0, 1, 2]
    ops = [(set_id, f"{name}") for set_id in sets for name in "abc"]
    left = {rank: [op for op in data.draw(st.permutations(ops)) if rank in sets[op[0]]] for rank in range(size)}
    heard: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    while any(left.values()):
        rank = data.draw(st.sampled_from([rank for rank in left if left[rank]]))
        set_id, name = left[rank].pop(0)
        for verdict, ranks in submit(machine, rank, request(name, set_id=set_id)):
            for one in ranks:
                heard[one] += [(verdict.set_id, each) for each in verdict.names]
    for rank in range(size):
        assert sorted(heard[rank]) == sorted(op for op in ops if rank in sets[op[0]])
        for other in range(rank):  # what two ranks share, they follow in the same order: no two can wait for each other
            shared = {op for op in ops if {rank, other} <= set(sets[op[0]])}
            assert [op for op in heard[rank] if op in shared] == [op for op in heard[other] if op in shared]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (request("x", shapes=((2, 4),)), "tensor shapes"),
        (request("x", dtypes=("int32",)), "data types"),
        (request("x", reduction=Reduction.MAX), "reduction operation"),
        (request("x", prescale=2.0), "prescale"),
        (request("x", device="cuda"), "CPU/GPU"),
        (request("x", kind=Kind.ALLGATHER), "operations"),
    ],
)
def test_what_does_not_fit_is_an_error_on_all_ranks(other: OpRequest, says: str) -> None:
    machine = Negotiation(range(3), fusion_bytes=LARGE)
    assert submit(machine, 0, request("x")) == submit(machine, 1, request("x")) == []
    ((verdict, ranks),) = submit(machine, 2, other)
    assert says in verdict.error
    assert sorted(ranks) == [0, 1, 2]
    decided = [submit(machine, rank, request("x")) for rank in range(3)]  # the name is free again
    assert not decided[-1][0][0].error


def test_roots_that_differ_are_an_error() -> None:
    machine = Negotiation(range(2), fusion_bytes=LARGE)
    submit(machine, 0, request("x", Kind.BROADCAST, root=0))
    assert "root" in submit(machine, 1, request("x", Kind.BROADCAST, root=1))[0][0].error


def test_rows_may_differ_in_an_all_gather_and_nothing_else() -> None:
    machine = Negotiation(range(2), fusion_bytes=LARGE)
    submit(machine, 1, request("x", Kind.ALLGATHER, shapes=((5, 2),)))
    assert submit(machine, 0, request("x", Kind.ALLGATHER))[0][0].lengths == ((4, 5),)
    submit(machine, 1, request("x", Kind.ALLGATHER, shapes=((4, 3),)))
    assert "dimensions after the first" in submit(machine, 0, request("x", Kind.ALLGATHER))[0][0].error


def test_all_reduces_that_are_ready_together_travel_together_up_to_the_limit() -> None:
    machine = Negotiation(range(2), fusion_bytes=2 * 32)
    requests = [request("a"), request("b"), request("c"), request("d", postscale=3.0)]
    submit(machine, 0, *requests)
    assert [verdict.names for verdict, _ in submit(machine, 1, *requests)] == [("a", "b"), ("c",), ("d",)]


def test_a_rank_that_has_joined_takes_part_until_all_have() -> None:
    machine = Negotiation(range(3), fusion_bytes=LARGE)
    join = OpRequest(name=Kind.JOIN, kind=Kind.JOIN)
    submit(machine, 1, request("early"))
    assert submit(machine, 2, join) == []
    ((verdict, ranks),) = submit(machine, 0, request("early"))
    assert (verdict.names, verdict.shapes, ranks) == (("early",), (((4, 2),),), (0, 1, 2))
    submit(machine, 0, request("rows", Kind.ALLGATHER))
    assert "Join" in submit(machine, 1, request("rows", Kind.ALLGATHER))[0][0].error
    assert submit(machine, 0, join) == []
    ((verdict, ranks),) = submit(machine, 1, join)
    assert (verdict.kind, verdict.value, ranks) == (Kind.JOIN, 1, (0, 1, 2))
    assert submit(machine, 2, request("late")) == []  # from then on it has to be there again


def test_a_join_makes_ready_what_only_waited_for_it() -> None:
    machine = Negotiation(range(2), fusion_bytes=LARGE)
    submit(machine, 0, request("a"))
    assert submit(machine, 1, OpRequest(name=Kind.JOIN, kind=Kind.JOIN))[0][0].names == ("a",)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_is_gone_fails_what_waits_for_it_and_what_comes(leaves: bool) -> None:
    machine = Negotiation(range(3), fusion_bytes=LARGE)
    submit(machine, 0, request("a"))
    submit(machine, 2, request("b"))
    if leaves:
        machine.leave(2)
    else:
        machine.lose(2, "was lost")
    decided = machine.decide()
    errors = {verdict.names: ranks for verdict, ranks in decided if verdict.error}
    assert errors == {("a",): (0,), ("b",): (2,)}
    assert [ranks for verdict, ranks in decided if verdict.kind == Kind.SHUTDOWN] == ([(2,)] if leaves else [])
    ((verdict, ranks),) = submit(machine, 1, request("c"))
    assert "rank 2" in verdict.error
    assert ranks == (1,)


def test_a_set_without_the_rank_that_is_gone_goes_on() -> None:
    machine = Negotiation(range(3), fusion_bytes=LARGE)
    number = added(machine, 3, (0, 1))
    machine.lose(2, "was lost")
    machine.decide()
    submit(machine, 0, request("a", set_id=number))
    assert not submit(machine, 1, request("a", set_id=number))[0][0].error


def test_the_same_ranks_make_one_process_set_and_a_removed_one_ends() -> None:
    machine = Negotiation(range(2), fusion_bytes=LARGE)

    def both(one: OpRequest) -> OpVerdict:
        submit(machine, 0, one)
        return submit(machine, 1, one)[-1][0]

    add = request("s", Kind.ADD_SET, ranks=(1,), dtypes=(), shapes=())
    number = both(add).value
    assert both(add).value == -1
    assert both(request("r", Kind.REMOVE_SET, root=number, dtypes=(), shapes=())).value == number
    assert "does not exist" in submit(machine, 1, request("a", set_id=number))[0][0].error


def test_what_comes_with_the_removal_of_its_process_set_fails_and_the_others_run() -> None:
    machine = Negotiation(range(3), fusion_bytes=LARGE)
    number = added(machine, 3, (0, 1))
    both = [
        request("r", Kind.REMOVE_SET, root=number, dtypes=(), shapes=()),
        request("a", set_id=number),
        request("b", set_id=number),
        request("c"),
    ]
    machine.submit(0, both, now=0.0)
    machine.submit(2, [both[0], both[3]], now=0.0)
    machine.submit(1, both, now=0.0)
    found = {verdict.names: (verdict.error, ranks) for verdict, ranks in machine.decide()}
    removed = f"process set {number} was removed"
    everyone, pair = ("", (0, 1, 2)), (removed, (0, 1))
    assert found == {("a",): pair, ("b",): pair, ("r",): everyone, ("c",): everyone}


def test_a_stalled_operation_is_reported_once_with_the_ranks_that_are_missing_and_fails_at_the_limit() -> None:
    machine = Negotiation(range(3), fusion_bytes=LARGE)
    submit(machine, 1, request("a"), now=10.0)
    assert machine.stalled(20.0, after_s=60.0) == []
    (stalled,) = machine.stalled(80.0, after_s=60.0)
    assert (stalled.name, stalled.missing, stalled.waited_s) == ("a", (0, 2), 70.0)
    assert machine.stalled(90.0, after_s=60.0) == []
    machine.expire(100.0, limit_s=600.0)
    assert machine.decide() == []
    machine.expire(700.0, limit_s=600.0)
    ((verdict, ranks),) = machine.decide()
    assert "ranks 0, 2" in verdict.error
    assert ranks == (1,)


def test_a_join_has_no_limit_while_others_are_at_work() -> None:
    machine = Negotiation(range(2), fusion_bytes=LARGE)
    submit(machine, 0, OpRequest(name=Kind.JOIN, kind=Kind.JOIN), now=0.0)
    submit(machine, 1, request("a"), now=500.0)
    machine.expire(1000.0, limit_s=600.0)
    assert machine.decide() == []
    machine.expire(1101.0, limit_s=600.0)
    assert [verdict.kind for verdict, _ in machine.decide()] == [Kind.FAILED]


def test_after_a_failure_nothing_runs_any_more() -> None:
    machine = Negotiation(range(2), fusion_bytes=LARGE)
    submit(machine, 0, request("a"))
    machine.fail("it broke")
    kinds = [(verdict.kind, verdict.error, ranks) for verdict, ranks in machine.decide()]
    assert kinds == [(Kind.ALLREDUCE, "it broke", (0,)), (Kind.FAILED, "it broke", (0, 1))]
    assert submit(machine, 1, request("b"))[0][0].error == "it broke"


@settings(max_examples=20, deadline=None)
@given(
    st.builds(
        OpRequest,
        name=st.text(max_size=20),
        kind=st.sampled_from([Kind.ALLREDUCE, Kind.ALLTOALL]),
        set_id=st.integers(0, 9),
        dtypes=st.just(("float32", "int64")),
        shapes=st.just(((), (3, 0))),
        prescale=st.floats(allow_nan=False, allow_infinity=False),
        splits=st.lists(st.integers(0, 9)).map(tuple),
    )
)
def test_requests_travel_as_lines_and_come_back_as_they_were(one: OpRequest) -> None:
    line = encoded("requests", [one, dataclasses.replace(one, name="other")])
    assert line.count(b"\n") == 1
    assert decoded(line) == ("requests", [one, dataclasses.replace(one, name="other")])


@pytest.mark.parametrize("line", [b"", b"{}", b'["requests",1]', b'["requests",[1]]', b"\xff"])
def test_what_is_no_message_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decoded(line)
