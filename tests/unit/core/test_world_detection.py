"""World detection: every launcher's variables are understood; sources that disagree are an error with a remedy.

The variables are what torchrun, srun 22.05, Open MPI 5 and MPICH 4 really set.
"""

from __future__ import annotations

import signal

import pytest

from paceline.errors import LaunchError
from paceline.world_detection import World, expand_hosts, expand_tasks_per_node, find_world, notice_signals

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job7",
}
SLURM_BATCH_SCRIPT = {
    "SLURM_JOB_ID": "12",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_NODELIST": "n[1-3]",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
}
SLURM = SLURM_BATCH_SCRIPT | {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "4",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "n[1-2,5]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-n1-7@1",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}


def world(**fields: object) -> World:
    return World(**fields)  # pyright: ignore[reportArgumentType]  # the values are of many types


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param(
            TORCHRUN,
            world(
                source="torchrun",
                worker_rank=3,
                workers=4,
                local_rank=1,
                local_workers=2,
                head="node1",
                head_port=29500,
                job_id="job7",
            ),
            id="torchrun",
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2"},
            world(source="torchrun", worker_rank=1, workers=2, local_rank=1, local_workers=2),
            id="by-hand",
        ),
        pytest.param(
            SLURM,
            world(source="slurm", worker_rank=4, workers=5, local_rank=0, local_workers=1, head="n1", job_id="12.0"),
            id="srun",
        ),
        pytest.param(
            OPENMPI,
            world(source="openmpi", worker_rank=1, workers=4, local_rank=1, local_workers=2, job_id="prterun-n1-7@1"),
            id="open-mpi",
        ),
        pytest.param(MPICH, world(source="mpi", worker_rank=2, workers=4, local_rank=0, local_workers=2), id="mpich"),
    ],
)
def test_each_launcher_is_understood(variables: dict[str, str], expected: World | None) -> None:
    assert find_world(variables) == expected


def test_a_batch_script_is_no_world() -> None:
    assert find_world(SLURM_BATCH_SCRIPT) is None


def test_a_step_of_one_task_is_no_world() -> None:
    assert find_world(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_the_head_may_be_told_by_hand_under_any_launcher() -> None:
    found = find_world(SLURM | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"})
    assert found is not None
    assert (found.source, found.head, found.head_port) == ("slurm", "10.0.0.1", 7000)


def test_srun_that_also_sets_pmi_variables_agrees_with_itself() -> None:
    found = find_world(SLURM | {"PMI_RANK": "4", "PMI_SIZE": "5"})
    assert found is not None
    assert (found.source, found.worker_rank, found.local_workers) == ("slurm", 4, 1)


def test_ranks_copied_from_srun_take_the_local_numbers_from_it() -> None:
    found = find_world(SLURM | {"RANK": "4", "WORLD_SIZE": "5", "MASTER_ADDR": "n1", "LOCAL_RANK": "0"})
    assert found is not None
    assert (found.worker_rank, found.workers, found.local_rank, found.local_workers) == (4, 5, 0, 1)


ONE_PER_NODE = SLURM | {
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
}


@pytest.mark.parametrize("outer", [ONE_PER_NODE, OPENMPI | {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}])
def test_torchrun_started_once_per_node_by_an_outer_launcher_counts(outer: dict[str, str]) -> None:
    # torchrun numbers its nodes itself: this one is its second (ranks 2 and 3), but the outer launcher's first.
    found = find_world(outer | {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"} | TORCHRUN)
    assert found is not None
    assert (found.source, found.worker_rank, found.workers) == ("torchrun", 3, 4)


def test_torchrun_with_one_worker_per_node_counts_even_when_it_numbers_the_nodes_otherwise() -> None:
    inner = TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    found = find_world(ONE_PER_NODE | inner)
    assert found is not None
    assert (found.source, found.worker_rank, found.workers) == ("torchrun", 1, 2)


def test_mpirun_that_started_its_daemons_by_srun_counts() -> None:
    found = find_world(ONE_PER_NODE | MPICH)
    assert found is not None
    assert (found.source, found.worker_rank, found.workers) == ("mpi", 2, 4)


def test_torchrun_started_by_every_task_is_a_disagreement() -> None:
    alone = TORCHRUN | {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
    with pytest.raises(LaunchError) as caught:
        find_world(SLURM | alone)
    message = str(caught.value)
    assert "\n  torchrun: worker 1 of 2\n  slurm: worker 4 of 5\n" in message
    assert "Set PACELINE_WORLD=torchrun or PACELINE_WORLD=slurm to choose one, or PACELINE_WORLD=none" in message


def test_worlds_that_disagree_are_settled_by_the_user() -> None:
    both = OPENMPI | MPICH
    with pytest.raises(LaunchError, match="disagree"):
        find_world(both)
    for choice, rank in (("openmpi", 1), ("MPI", 2)):
        found = find_world(both | {"PACELINE_WORLD": choice})
        assert found is not None
        assert (found.source, found.worker_rank) == (choice.lower(), rank)
    assert find_world(both | {"PACELINE_WORLD": "none"}) is None


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set, but others that need it are."),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; it must be a whole number from 0 up."),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "do not fit together: worker 2 of 2"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node1"}, "Set LOCAL_RANK and LOCAL_WORLD_SIZE, too"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "number 1 of 8 on its host"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2*2"}, "SLURM_STEP_TASKS_PER_NODE is '2*2'; expected something like"),
        (SLURM | {"SLURM_NODEID": "3"}, "SLURM_NODEID is 3, but SLURM_STEP_TASKS_PER_NODE has 3 nodes only"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID and MPI_LOCALNRANKS are not set"),
        (
            {"PACELINE_WORLD": "slrm"},
            "PACELINE_WORLD is 'slrm'; it must be one of torchrun, slurm, openmpi, mpi, or none",
        ),
        ({"PACELINE_WORLD": "slurm"}, "PACELINE_WORLD=slurm, but the environment has no world of slurm."),
    ],
)
def test_incomplete_or_damaged_variables_are_named_with_a_remedy(variables: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError) as caught:
        find_world(variables)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", ()),
        ("n1", ("n1",)),
        ("n[1-2,5]", ("n1", "n2", "n5")),
        ("n[08-10],gpu7", ("n08", "n09", "n10", "gpu7")),
        ("a-1-b,rack[1-2]node[3,5]x", ("a-1-b", "rack1node3x", "rack1node5x", "rack2node3x", "rack2node5x")),
    ],
)
def test_a_node_list_is_expanded(text: str, hosts: tuple[str, ...]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(("text", "counts"), [("3", (3,)), ("2(x2),1", (2, 2, 1)), ("1(x3)", (1, 1, 1))])
def test_tasks_per_node_are_expanded(text: str, counts: tuple[int, ...]) -> None:
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        pytest.param({}, (), id="SIGTERM alone"),
        pytest.param(SLURM, (signal.SIGUSR1,), id="in a Slurm job"),
        pytest.param(SLURM | {"PACELINE_NOTICE": "none"}, (), id="in a Slurm job that has another use of it"),
        pytest.param({"PACELINE_NOTICE": "SIGUSR2, usr1"}, (signal.SIGUSR2, signal.SIGUSR1), id="as one likes"),
    ],
)
def test_signals_that_ask_workers_to_leave(variables: dict[str, str], expected: tuple[int, ...]) -> None:
    assert notice_signals(variables) == expected


@pytest.mark.parametrize("name", ["KILL", "STOP", "USR7", "USR1,CHLD", "alarm!"])
def test_what_cannot_be_such_a_signal_is_refused(name: str) -> None:
    with pytest.raises(LaunchError, match=r"PACELINE_NOTICE is .*names of signals that a program can wait for"):
        notice_signals({"PACELINE_NOTICE": name})
