"""What a program uses, and where its curves are, seen from outside."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from paceline.compat.tensorflow.task_look import TaskLook, event_files, link_curves


def test_what_a_process_uses_is_told_since_the_look_before() -> None:
    look = TaskLook(os.getpid())
    first = look.take()
    assert first is not None and first.memory_bytes > 1 << 20 and first.age_s > 0
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    second = look.take()
    assert second is not None and second.cores > 0 and second.age_s > first.age_s


def test_nothing_is_told_of_a_process_that_has_ended() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    assert TaskLook(pid).take() is None and event_files(pid) == []


def test_folders_with_open_event_files_are_found_and_linked_once(tmp_path: Path) -> None:
    run = tmp_path / "run" / "tensorboard"
    own = [tmp_path / "logs" / "train", tmp_path / "logs" / "validation", tmp_path / "other" / "train"]
    for folder in own:
        folder.mkdir(parents=True)
    with contextlib.ExitStack() as files:
        for path in [*(folder / "events.out.tfevents.123.host.1.2.v2" for folder in own), tmp_path / "events.txt"]:
            files.enter_context(path.open("wb"))
        files = event_files(os.getpid())
    found = [file.parent for file in files]
    assert found == sorted(own)
    for _ in range(2):
        link_curves(found, run, "worker 0")
    links = {link.name: Path(os.readlink(link)) for link in (run / "program" / "worker_0").iterdir()}
    assert links == {"train": own[0], "validation": own[1], "train_1": own[2]}


def test_what_the_program_writes_into_the_runs_own_folder_needs_no_link(tmp_path: Path) -> None:
    run = tmp_path / "tensorboard"
    link_curves([run / "mine"], run, "chief")
    assert not (run / "program").exists()
