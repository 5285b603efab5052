"""Two hosts train one model: the same losses as one process, and one end for both."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from network_hosts import NamespaceHost, needs_network, two_hosts
from programs import (
    GONE_S,
    PACELINE,
    STEPS,
    Announcements,
    Program,
    checkpoints,
    command,
    losses,
    record,
    reference_losses,
    run,
    started_workers,
    the_run,
    write_program,
)

PORT = 29511
LOST_S = 15.0  # from the death of a host to the end of the job on the other one


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[NamespaceHost]]:
    with two_hosts(tmp_path_factory.mktemp("network"), names=("left", "right"), subnet="10.79.0") as made:
        yield made


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Announcements]:
    with contextlib.closing(Announcements(tmp_path / "pipe")) as announcements:
        yield announcements


@pytest.fixture
def train(tmp_path: Path) -> Path:
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
    write_token(tmp_path / "token", "0123456789abcdef0123456789abcdef")
    return write_program(tmp_path)


def write_token(path: Path, text: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    return path


def words_of(train: Path, head: NamespaceHost, *options: Any, token: str = "token") -> list[Any]:
    """The same command on each host."""
    job = ["--workers", "4", "--hosts", "2", "--head", f"{head.address}:{PORT}", "--token-file", train.parent / token]
    return [*PACELINE, "run", train, *job, *options]


@contextlib.contextmanager
def both(hosts: list[NamespaceHost], train: Path, *options: Any, own_disks: bool = True) -> Iterator[list[Program]]:
    """The job on both hosts, the head's program first; each in a folder of its own where they share no disk."""
    with contextlib.ExitStack() as stack:
        folders = [train.parent / host.name if own_disks else train.parent for host in hosts]
        yield [
            stack.enter_context(command(*words_of(train, hosts[0], *options), host=host, cwd=folder))
            for host, folder in zip(hosts, folders, strict=True)
        ]


@needs_network
def test_two_hosts_without_a_shared_disk_train_the_same(
    hosts: list[NamespaceHost], train: Path, tmp_path: Path, pipe: Announcements
) -> None:
    with both(hosts, train, "--tell", pipe.path) as programs:
        told = {one["rank"]: one for one in programs[0].told(pipe, 4)}
        ends = [program.end() for program in programs]
        assert [program.left() for program in programs] == [[], []]
    assert [code for code, _ in ends] == [0, 0], ends
    head, member = (the_run(tmp_path / host.name) for host in hosts)
    assert head.name == member.name  # one run, one name
    assert losses(head) == pytest.approx(list(reference_losses()), rel=1e-5)
    assert checkpoints(head) == [4, STEPS]
    assert (record(head)["state"], record(head)["host"]) == ("finished", "left")
    assert sorted(path.name for path in member.iterdir()) == ["attempt_1"]  # its workers' logs, and nothing of the run
    assert [one["rank"] for one in started_workers(member)] == [2, 3]
    # gloo uses each host's end of the cable.
    places = [(told[rank]["host"], told[rank]["interface"]) for rank in range(4)]
    assert places == [(hosts[rank // 2].name, hosts[rank // 2].device) for rank in range(4)]


@needs_network
def test_two_hosts_that_share_a_disk_keep_one_run(hosts: list[NamespaceHost], train: Path, tmp_path: Path) -> None:
    options = ("--run-dir", "run")
    with both(hosts, train, *options, "--max-steps", "6", own_disks=False) as programs:
        ends = [program.end() for program in programs]
    assert [code for code, _ in ends] == [0, 0], ends
    with both(hosts, train, *options, own_disks=False) as programs:
        ends = [program.end() for program in programs]
    assert [code for code, _ in ends] == [0, 0], ends
    run_dir = tmp_path / "run"
    assert losses(run_dir) == pytest.approx(list(reference_losses()), rel=1e-5)
    assert [attempt["attempt"] for attempt in record(run_dir)["attempts"]] == [1, 2]
    assert [(one["rank"], one["host"], one["resumed_from_step"]) for one in started_workers(run_dir, 2)] == [
        (0, "left", 6), (1, "left", 6), (2, "right", 6), (3, "right", 6),
    ]  # fmt: skip


@needs_network
def test_a_wrong_token_is_refused_and_told_on_both_sides(
    hosts: list[NamespaceHost], train: Path, tmp_path: Path
) -> None:
    write_token(tmp_path / "other", "fedcba9876543210fedcba9876543210")
    head, member = hosts
    with command(*words_of(train, head), host=head, cwd=tmp_path / "left") as waiting:
        code, output = run(*words_of(train, head, token="other"), host=member, cwd=tmp_path / "right")
        assert code == 2
        assert "cannot join the job" in output and "it holds another token than this host" in output
        waiting.signal(signal.SIGTERM)
        code, output = waiting.end(limit_s=GONE_S)
        assert waiting.left() == []
    assert code == 143
    assert f"refused a connection from {member.address}: its token is wrong" in output
    assert not (tmp_path / "left" / "runs").exists()  # the job never began


@needs_network
def test_a_host_that_is_lost_ends_the_job_by_its_name(
    hosts: list[NamespaceHost], train: Path, tmp_path: Path, pipe: Announcements
) -> None:
    with both(hosts, train, "--epochs", "100000", "--tell", pipe.path) as (head, member):
        head.told(pipe, 4)
        for line in member.left():  # everything on it at once, as when the power fails
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
        code, output = head.end(limit_s=LOST_S)
        assert head.left() == []
    assert code == 76
    assert f"host right ({hosts[1].address}) was lost" in output
    assert record(the_run(tmp_path / "left"))["state"] == "failed"


@needs_network
def test_ctrl_c_on_any_host_stops_the_job_on_both(
    hosts: list[NamespaceHost], train: Path, tmp_path: Path, pipe: Announcements
) -> None:
    with both(hosts, train, "--epochs", "100000", "--tell", pipe.path) as (head, member):
        head.told(pipe, 4)
        member.signal(signal.SIGINT)
        ends = [program.end(limit_s=GONE_S) for program in (head, member)]
        assert (head.left(), member.left()) == ([], [])
    assert [code for code, _ in ends] == [75, 75], ends
    assert all("everything is saved" in output or "Ctrl-C came on host" in output for _, output in ends), ends
    assert record(the_run(tmp_path / "left"))["state"] == "stopped"


@needs_network
def test_a_world_set_by_hand_meets_at_a_head_whose_own_name_is_loopback(train: Path, tmp_path: Path) -> None:
    """As any engine may set it: RANK and its kin. The head's name is another address on the head itself."""
    world = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "h1",
        "MASTER_PORT": str(PORT),
    }
    world["PACELINE_TOKEN"] = (tmp_path / "token").read_text()
    with contextlib.ExitStack() as stack:
        made = two_hosts(tmp_path, names=("h1", "h2"), subnet="10.80.0", own_name_is_loopback=True)
        programs = [
            stack.enter_context(command(PACELINE[0], train, host=host, environment=world | {"RANK": str(number)}))
            for number, host in enumerate(stack.enter_context(made))
        ]
        ends = [program.end() for program in programs]
    assert [code for code, _ in ends] == [0, 0], ends
    assert "h1 means 127.0.1.1 on its own host" in ends[0][1]
    run_dir = the_run(tmp_path)
    assert losses(run_dir) == pytest.approx(list(reference_losses()), rel=1e-5)
    assert [one["host"] for one in started_workers(run_dir)] == ["h1", "h2"]


@needs_network
def test_a_function_runs_on_two_hosts_and_the_head_has_its_value(hosts: list[NamespaceHost], tmp_path: Path) -> None:
    program = tmp_path / "call.py"
    program.write_text(
        "import json, socket, paceline\n"
        "def train(worker):\n    return worker.gather(socket.gethostname())\n"
        "if __name__ == '__main__':\n"
        f"    job = dict(workers=3, hosts=2, head='{hosts[0].address}:{PORT}', run_dir='run')\n"
        "    print('value', json.dumps(paceline.run(train, **job)))\n"
    )
    environment = {"PACELINE_TOKEN": "0123456789abcdef0123456789abcdef"}
    with contextlib.ExitStack() as stack:
        programs = [
            stack.enter_context(command(PACELINE[0], program, host=host, environment=environment)) for host in hosts
        ]
        ends = [one.end() for one in programs]
    assert [code for code, _ in ends] == [0, 0], ends
    assert f"value {json.dumps(['left', 'left', 'right'])}" in ends[0][1]
    assert "value null" in ends[1][1]


WIDE = """\
import torch, torch.nn.functional as F, paceline

def train(worker):
    torch.manual_seed(1)
    model = worker.prepare(torch.nn.Linear(512, 512))
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), F.mse_loss)
    data = torch.utils.data.TensorDataset(torch.randn(8, 512), torch.randn(8, 512))
    for batch in worker.batches(data, epochs=26):
        step(batch)

if __name__ == "__main__":
    paceline.run(train, workers=2, plan="replicas=2+powersgd(rank=128)+batch(size=8,micro=4)")
"""


@needs_network
def test_between_hosts_with_a_fast_link_power_sgd_is_said_to_cost_more_than_it_saves(
    hosts: list[NamespaceHost], train: Path, tmp_path: Path
) -> None:
    """A factor of rank 128 is a quarter of the bytes, and takes some times as long to find as the cable for them."""
    program = write_program(train.parent, name="wide.py", text=WIDE)
    with both(hosts, program, "--workers", "2", "--private-network") as programs:  # so encryption does not slow it
        ends = [one.end() for one in programs]
    assert [code for code, _ in ends] == [0, 0], ends
    said = re.findall(
        r"after step 25: the link needs (.+) of a (.+) step: (.+) takes (.+) for encoding, and costs "
        r"(.+) more than it saves. Raw\(\) is faster here",
        ends[0][1],
    )
    assert [one[2] for one in said] == ["PowerSGD(rank=128)"], ends[0][1]
    assert "after step" not in ends[1][1]
    head = the_run(tmp_path / "left")
    [worker] = [path for path in head.glob("attempt_1/worker_*") if "WireJudged" in (path / "events.jsonl").read_text()]
    events = map(json.loads, (worker / "events.jsonl").read_text().splitlines())
    [judged] = [event for event in events if event["event"] == "WireJudged"]
    assert (worker.name, judged["kind"], judged["step"]) == ("worker_0", "costs", 25)
    # What the link takes for the raw bytes and for those that are sent are two measurements of next to nothing here.
    assert judged["link_s"] > 0 > judged["saved_s"] and abs(judged["saved_s"] + judged["encoding_s"]) < judged["link_s"]
    assert json.loads((head / "summary.json").read_text())["wire_judged"]["kind"] == "costs"
