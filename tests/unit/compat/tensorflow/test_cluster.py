"""Roles and TF_CONFIG from a list of addresses, and which GPUs a task sees."""

from __future__ import annotations

import json

import pytest

from paceline.compat.tensorflow.cluster import address_text, places_of, tasks_on, tf_config, visible_gpus_of


def config(rank: int, processes: int, servers: int | None) -> dict[str, object]:
    places = places_of(processes, servers)
    text = tf_config(rank, places, [f"h{number}:{5000 + number}" for number in range(processes)])
    assert text is not None
    return json.loads(text)


def test_without_servers_all_tasks_are_workers_in_the_order_of_their_ranks() -> None:
    for rank in range(3):
        assert config(rank, 3, None) == {
            "cluster": {"worker": ["h0:5000", "h1:5001", "h2:5002"]},
            "task": {"type": "worker", "index": rank},
        }


@pytest.mark.parametrize(
    ("rank", "task"),
    [(0, ("chief", 0)), (1, ("worker", 0)), (2, ("worker", 1)), (3, ("ps", 0)), (4, ("ps", 1))],
)
def test_with_servers_there_is_a_chief_beside_the_workers(rank: int, task: tuple[str, int]) -> None:
    found = config(rank, 5, 2)
    assert found["task"] == {"type": task[0], "index": task[1]}
    assert found["cluster"] == {
        "chief": ["h0:5000"],
        "worker": ["h1:5001", "h2:5002"],
        "ps": ["h3:5003", "h4:5004"],
    }


def test_a_task_that_is_alone_is_no_cluster() -> None:
    assert tf_config(0, places_of(1, None), [""]) is None


def test_only_the_chief_drives_and_only_workers_beside_servers_are_replaced_alone() -> None:
    chief, worker, server = places_of(3, 1)
    assert [place.drives for place in (chief, worker, server)] == [True, False, False]
    assert [place.serves for place in (chief, worker, server)] == [False, True, True]
    assert [place.is_replaceable for place in (chief, worker, server)] == [False, True, False]
    (mirrored, _) = places_of(2, None)
    assert not (mirrored.drives or mirrored.serves or mirrored.is_replaceable) and mirrored.computes


@pytest.mark.parametrize(
    ("host", "text"), [("10.0.0.1", "10.0.0.1:7"), ("node1", "node1:7"), ("fd00::1", "[fd00::1]:7")]
)
def test_addresses_are_written_as_tensorflow_reads_them(host: str, text: str) -> None:
    assert address_text(host, 7) == text


def test_tasks_of_a_host_are_found_by_what_all_have_told() -> None:
    told = {0: {"host_index": 0}, 1: {"host_index": 1}, 2: {"host_index": 0}}
    assert tasks_on(told, 0) == [0, 2] and tasks_on(told, 1) == [1]


@pytest.mark.parametrize(
    ("gpus", "device", "seen"),
    [
        (["0", "1", "2", "3"], "auto", [(), ("0", "1"), ("2", "3"), ()]),  # chief and server compute nothing
        (["5", "7", "8"], "auto", [(), ("5",), ("7",), ()]),  # those that are left over stay idle
        (["0"], "auto", [(), (), (), ()]),  # too few for both workers
        (["0", "1"], "cpu", [(), (), (), ()]),
        ([], "auto", [None, None, None, None]),
    ],
)
def test_tasks_that_compute_share_the_gpus_of_their_host(
    gpus: list[str], device: str, seen: list[tuple[str, ...] | None]
) -> None:
    places = places_of(4, 1)
    found = [visible_gpus_of(rank, places, here=range(4), gpus=gpus, device=device) for rank in range(4)]
    assert found == seen


def test_tasks_of_other_hosts_take_no_share_of_the_gpus() -> None:
    places = places_of(4, None)
    assert visible_gpus_of(3, places, here=[2, 3], gpus=["0", "1"], device="auto") == ("1",)
