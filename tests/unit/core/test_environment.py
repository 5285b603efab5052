"""The environment: a worker's place is its own process's only, the token is guarded, children inherit what they may."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import environment
from paceline.errors import LaunchError, PlanError
from paceline.plan import Assignment, CommandPlan, Job

SECRET = "0123456789abcdef0123456789abcdef"
ASSIGNMENT = Assignment(
    rank=1,
    workers=2,
    local_rank=1,
    local_workers=2,
    host="here",
    host_index=0,
    hosts=1,
    address="127.0.0.1",
    run_dir="runs/x",
    attempt=1,
    worker_dir="runs/x/attempt_1/worker_1",
    channel_fd=-1,
    command_started=0.0,
    job=Job(),
)
WHERE = "from paceline import environment; print(environment.assignment(), environment.detect())"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No world and no choice of the machine's own; what a test sets is undone."""
    for name in environment.world_variables():
        monkeypatch.delenv(name)
    for name in (environment.OWN_ASSIGNMENT, environment.OWN_PID):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return monkeypatch


def test_a_worker_knows_its_assignment_and_its_world_wins(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("RANK", "0")
    clean.setenv("WORLD_SIZE", "64")
    environment.enter(ASSIGNMENT)
    assert environment.assignment() == ASSIGNMENT
    world = environment.detect()
    assert world is not None
    assert (world.source, world.worker_rank, world.workers, world.local_rank) == ("paceline", 1, 2, 1)


def test_a_process_that_was_a_worker_can_leave() -> None:
    environment.enter(ASSIGNMENT)
    environment.leave()
    assert environment.assignment() is None
    assert environment.detect() is None


def test_a_child_of_a_worker_is_no_worker_even_under_torchrun(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("RANK", "0")
    clean.setenv("WORLD_SIZE", "2")
    environment.enter(ASSIGNMENT)
    done = subprocess.run([sys.executable, "-c", WHERE], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["None", "None"], done.stderr


def test_outside_of_a_worker_the_launcher_counts(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("RANK", "1")
    clean.setenv("WORLD_SIZE", "2")
    world = environment.detect()
    assert world is not None
    assert (world.source, world.worker_rank) == ("torchrun", 1)


def test_a_damaged_assignment_is_an_error_that_says_what_to_unset(clean: pytest.MonkeyPatch) -> None:
    clean.setenv(environment.OWN_PID, str(os.getpid()))
    for damaged in ("{", "{}"):
        clean.setenv(environment.OWN_ASSIGNMENT, damaged)
        with pytest.raises(LaunchError, match="Unset PACELINE_ASSIGNMENT and PACELINE_PID"):
            environment.assignment()


def token_file(tmp_path: Path, content: str, mode: int = 0o600) -> Job:
    path = tmp_path / "token"
    path.write_text(content)
    path.chmod(mode)
    return Job(token_file=str(path))


def test_the_token_comes_from_the_file_before_the_environment(tmp_path: Path, clean: pytest.MonkeyPatch) -> None:
    clean.setenv("PACELINE_TOKEN", "f" * 32)
    assert environment.token(Job()) == b"f" * 32
    assert environment.token(token_file(tmp_path, f"{SECRET}\n")) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_file_that_others_can_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(LaunchError, match=rf"\(mode 0{mode:o}\)\. Use `chmod 600 .*token`"):
        environment.token(token_file(tmp_path, SECRET, mode))


def test_a_missing_or_short_token_says_how_to_make_one(tmp_path: Path, clean: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"The job has no token.*token_hex"):
        environment.token(Job())
    with pytest.raises(LaunchError, match=r"Cannot read the token file .*nowhere: No such file.*token_hex"):
        environment.token(Job(token_file=str(tmp_path / "nowhere")))
    with pytest.raises(LaunchError, match="has 5 bytes; it needs at least 16"):
        environment.token(token_file(tmp_path, "12345\n"))
    clean.setenv("PACELINE_TOKEN", "secret")
    with pytest.raises(LaunchError) as caught:
        environment.token(Job())
    assert "The token in PACELINE_TOKEN has 6 bytes" in str(caught.value)
    assert "secret" not in str(caught.value).replace("secrets", "")


def test_children_inherit_everything_but_our_own(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("PACELINE_TOKEN", SECRET)
    clean.setenv("SOMETHING_OF_THE_USER", "kept")
    environment.enter(ASSIGNMENT)
    child = environment.child_environment(EXTRA="1")
    assert child["SOMETHING_OF_THE_USER"] == "kept"
    assert child["EXTRA"] == "1"
    assert not {"PACELINE_TOKEN", "PACELINE_ASSIGNMENT", "PACELINE_PID"} & set(child)
    assert "EXTRA" not in os.environ


def test_the_shown_variables_do_not_show_the_token(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("PACELINE_TOKEN", SECRET)
    clean.setenv("WORLD_SIZE", "2")
    shown = environment.world_variables()
    assert shown == {"PACELINE_TOKEN": "(set, not shown)", "WORLD_SIZE": "2"}


def test_the_users_own_network_interface_is_kept(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert not environment.set_gloo_interface("lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    clean.delenv("GLOO_SOCKET_IFNAME")
    assert environment.set_gloo_interface("lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def test_the_users_own_log_level_is_kept(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    environment.quiet()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"
    clean.delenv("TORCH_CPP_LOG_LEVEL")
    environment.quiet()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "ERROR"


def test_workers_share_the_cores_they_may_use(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    clean.setattr(environment, "CGROUP", Path("nowhere"))
    assert [environment.default_threads(workers) for workers in (1, 2, 4, 12)] == [6, 3, 1, 1]


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "max 100000\n"}, 6),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 6),
        ({"cpu.max": "5000 100000\n"}, 1),
    ],
)
def test_a_containers_quota_counts(
    tmp_path: Path, clean: pytest.MonkeyPatch, files: dict[str, str], threads: int
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    clean.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    clean.setattr(environment, "CGROUP", tmp_path)
    assert environment.default_threads(1) == threads


def test_the_users_own_thread_count_wins(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("OMP_NUM_THREADS", "5,2")
    assert environment.default_threads(4) == 5
    clean.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(LaunchError, match="OMP_NUM_THREADS is 'many'"):
        environment.default_threads(1)


def test_an_assignment_keeps_every_field_on_its_way_through_the_environment() -> None:
    plan = CommandPlan.of(None, ["plan.batch.size=4"])
    full = dataclasses.replace(ASSIGNMENT, plan=plan, given=("workers",))
    environment.enter(full)
    assert environment.assignment() == full


def test_a_run_knows_the_pool_in_which_it_was_queued(clean: pytest.MonkeyPatch) -> None:
    assert environment.pool() is None
    clean.setenv(environment.POOL, "/data/lab")
    assert environment.pool() == environment.child_environment()[environment.POOL] == "/data/lab"


def test_a_trial_has_the_parameters_that_its_sweep_has_set(clean: pytest.MonkeyPatch) -> None:
    assert environment.trial_parameters() == {}
    clean.setenv(environment.PARAMETERS, '{"lr": 0.1, "how": "adamw"}')
    assert environment.trial_parameters() == {"lr": 0.1, "how": "adamw"}
    assert environment.child_environment()[environment.PARAMETERS] == '{"lr": 0.1, "how": "adamw"}'
    clean.setenv(environment.PARAMETERS, "lr=0.1")
    with pytest.raises(PlanError, match=r"PACELINE_PARAMETERS is 'lr=0.1', and is not JSON"):
        environment.trial_parameters()
