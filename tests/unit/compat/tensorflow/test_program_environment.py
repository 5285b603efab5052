"""The variables that a task's program gets, and the port that is kept for it."""

from __future__ import annotations

import dataclasses
import errno
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.compat.tensorflow.cluster import places_of
from paceline.compat.tensorflow.program_environment import device_text, host_gpus, program_environment
from paceline.compat.tensorflow.reserved_port import ReservedPort
from paceline.errors import PlanError
from paceline.plan import Assignment, Job

JOB = Job(program="train.py", run_for="tensorflow", workers=2)
TOLD = {rank: {"address": f"127.0.0.1:{5000 + rank}", "host_index": 0} for rank in range(2)}


def assignment(rank: int = 0, job: Job = JOB, workers: int = 2) -> Assignment:
    return Assignment(
        rank=rank, workers=workers, local_rank=rank, local_workers=workers, host="east", host_index=0, hosts=1,
        address="127.0.0.1", run_dir="run", attempt=1, worker_dir="w", channel_fd=-1, command_started=0.0, job=job,
    )  # fmt: skip


def variables(rank: int = 0, job: Job = JOB, told: dict[int, dict[str, Any]] = TOLD) -> dict[str, str]:
    return program_environment(assignment(rank, job, len(told)), places_of(len(told), None), told)


def test_a_task_of_several_gets_its_cluster_and_shares_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    found = variables(1)
    assert json.loads(found["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}
    assert found["TF_GRPC_REUSE_PORT"] == "true"


def test_a_task_that_is_alone_has_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {}}')
    assert "TF_CONFIG" not in variables(told={0: {"address": "", "host_index": 0}})


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "7")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    found = variables()
    assert (found["TF_NUM_INTRAOP_THREADS"], found["TF_CPP_MIN_LOG_LEVEL"]) == ("7", "0")
    chosen = variables(job=dataclasses.replace(JOB, threads=3))
    assert (chosen["TF_NUM_INTRAOP_THREADS"], chosen["OMP_NUM_THREADS"]) == ("3", "3")


def test_gpus_are_hidden_where_the_user_wants_none_and_missed_where_there_are_too_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hidden = variables(job=dataclasses.replace(JOB, device="cpu"))
    assert hidden["CUDA_VISIBLE_DEVICES"] == "-1" and device_text(hidden) == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(PlanError, match="needs a GPU for each of the 2 workers on this host, which has 0"):
        variables(job=dataclasses.replace(JOB, device="cuda"))


def test_the_hosts_gpus_are_its_device_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert host_gpus(tmp_path) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert host_gpus(tmp_path) == ["1"]


def test_a_reserved_port_is_given_to_nobody_but_a_server_that_shares_it() -> None:
    port = ReservedPort()
    try:
        with socket.socket() as stranger, pytest.raises(OSError) as refused:
            stranger.bind(("", port.number))
        assert refused.value.errno == errno.EADDRINUSE
        assert not port.has_listener
        for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
            if family == socket.AF_INET6 and not socket.has_dualstack_ipv6():
                continue
            with socket.socket(family) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                if family == socket.AF_INET6:
                    server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                server.bind((host, port.number))
                server.listen()
                assert port.has_listener
                with socket.create_connection(("127.0.0.1", port.number)) as client:
                    server.accept()[0].close()  # connections reach the server, never the reservation
                    assert client.recv(1) == b""
            assert not port.has_listener
    finally:
        port.close()
