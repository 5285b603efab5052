"""Who is where in a mesh, and which rows and micro-batches are whose: arithmetic, for all small numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.comm.sharded_tensors import rows_of
from paceline.parallel.mesh import Mesh, mesh_of
from paceline.plan import Layout
from paceline.schedule.micro_batches import split_among_replicas, split_evenly

counts = st.integers(1, 6)


@given(counts, counts, counts)
def test_places_and_ranks_are_each_others_inverse(a: int, b: int, c: int) -> None:
    mesh = Mesh({"replica": a, "shard": b, "tensor": c})
    places = [mesh.place(number) for number in range(mesh.workers)]
    assert [mesh.rank(place) for place in places] == list(range(a * b * c))
    assert len({tuple(place.values()) for place in places}) == mesh.workers


def test_the_workers_of_a_replica_are_neighbours() -> None:
    mesh = mesh_of(Layout(replicas=2, shard=3), 6)
    assert mesh.groups("shard") == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups("replica") == ((0, 3), (1, 4), (2, 5))
    assert {"replica": 1, "shard": 2}.items() <= mesh.place(5).items()
    both = mesh_of(Layout(replicas=2, shard=2, tensor=2), 8)
    assert both.group("tensor", 5) == (4, 5)
    assert both.group("shard", 5) == (5, 7)
    assert both.group("replica", 5) == (1, 5)
    with pytest.raises(ValueError, match="worker 6 is not in a mesh of 6 workers"):
        mesh.place(6)


@given(counts, counts, counts)
def test_the_groups_of_an_axis_hold_every_worker_once(a: int, b: int, c: int) -> None:
    mesh = Mesh({"replica": a, "shard": b, "tensor": c})
    for axis, size in mesh.sizes.items():
        groups = mesh.groups(axis)
        assert sorted(number for group in groups for number in group) == list(range(mesh.workers))
        assert all(len(group) == size for group in groups)


@given(st.integers(0, 40), st.integers(1, 9))
def test_rows_are_cut_as_torch_cuts_them(num_rows: int, size: int) -> None:
    chunks = list(torch.arange(num_rows).chunk(size)) if num_rows else []
    for index in range(size):
        first, stop = rows_of(num_rows, index=index, size=size)
        expected = chunks[index].tolist() if index < len(chunks) else []
        assert list(range(first, stop)) == expected


@given(st.integers(0, 60), counts, counts)
def test_replicas_run_every_micro_batch_once_in_step_with_fewest_void_runs(
    num_micro: int, replicas: int, each: int
) -> None:
    shares = split_among_replicas(num_micro, replicas=replicas, each=each)
    assert [place for share in shares for place in share.own] == list(range(num_micro))
    by_replica = [shares[number * each : (number + 1) * each] for number in range(replicas)]
    for replica in by_replica:
        assert len({share.num_runs for share in replica}) == 1
        for share in replica:
            assert len(share.own) <= share.num_runs
            # Each worker that makes a run has something to run, from its own replica.
            assert (share.num_runs == 0) or len(share.reads) >= 1
            assert all(any(place in other.own for other in replica) for place in share.reads)
    num_void = sum(share.num_runs - len(share.own) for share in shares)
    assert num_void == -num_micro % each  # none more than whole rows make necessary
    assert max(share.num_runs for share in shares) == -(-num_micro // (replicas * each))  # nobody waits longer


@given(st.integers(0, 60), counts)
def test_replicas_of_one_worker_get_their_shares_as_ever(num_micro: int, replicas: int) -> None:
    shares = split_among_replicas(num_micro, replicas=replicas, each=1)
    assert [share.own for share in shares] == list(split_evenly(num_micro, replicas))
    assert all(share.num_runs == len(share.own) and share.spare is None for share in shares)
