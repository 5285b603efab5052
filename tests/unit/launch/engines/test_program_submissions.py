"""Programs of other frameworks on engines: what each host is told to start."""

from __future__ import annotations

import re
from typing import Any

import pytest

from paceline.launch.engines.catalog import read_engine
from paceline.launch.engines.submission import Submission
from paceline.plan import CommandPlan, Job
from paceline.runs.submit import prepare, settled, show

GIVEN = ("program", "args", "run_for", "servers", "workers", "hosts", "private_network")


def submission(engine: str, **fields: Any) -> Submission:
    found = read_engine(engine, hosts="a,b") if engine == "ssh" else read_engine(engine)
    job = Job(
        program="/home/me/train.py", args=("--epochs", "3"), run_for="tensorflow", hosts=2, head="auto",
        run_dir="/home/me/runs/one", private_network=True, **fields,
    )  # fmt: skip
    return prepare(found, settled(found, job, CommandPlan(), script=None), plan=CommandPlan(), given=GIVEN)


def test_hosts_get_room_for_all_tasks_and_count_workers_as_the_user_does() -> None:
    sent = submission("slurm", workers=4, servers=1)
    assert (sent.job.workers, sent.slots) == (6, 3)  # a chief, four workers, a server, on two hosts
    words = " ".join(sent.host_command())
    assert "run /home/me/train.py --hosts 2 --workers 4 --head auto" in words
    assert "--for tensorflow" in words and "--servers 1" in words and words.endswith("--private-network -- --epochs 3")


def test_a_mirrored_job_is_sent_with_its_workers() -> None:
    sent = submission("slurm", workers=4)
    assert sent.slots == 2 and "--servers" not in sent.host_command()
    assert "--workers 4" in " ".join(sent.host_command())


@pytest.mark.parametrize("engine", ["slurm", "ssh", "kubernetes(image=mine,volume=disk:/home/me)", "ray"])
def test_every_engine_takes_such_a_program(engine: str) -> None:
    found = read_engine(engine, hosts="a,b") if engine == "ssh" else read_engine(engine)
    sent = show(found, submission(engine, workers=2, servers=1))
    assert re.search(r"--for\W+tensorflow\W", sent) and re.search(r"--servers\W+1\W", sent), sent
