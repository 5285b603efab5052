"""The register of a run: one coordinator at a time can change it."""

from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.launch.coordinator import head_register
from paceline.launch.coordinator.head_register import HeadRecord, HeadRegister, LocksMissing, Superseded

FIRST = HeadRecord(run="a", attempt=1, epoch=0, host="east", address="10.0.0.1:29500", state={"hosts": []})
SECOND = dataclasses.replace(FIRST, epoch=1, host="west", address="10.0.0.2:29500")


@pytest.fixture
def register(tmp_path: Path) -> HeadRegister:
    register = HeadRegister(tmp_path)
    register.begin(FIRST)
    return register


def test_a_coordinator_that_was_replaced_can_change_nothing(register: HeadRegister) -> None:
    register.update(dataclasses.replace(FIRST, state={"hosts": [1]}))
    register.take_over(SECOND)
    with pytest.raises(Superseded, match=r"led by host west \(10\.0\.0\.2:29500\)"):
        register.update(FIRST)
    register.end(FIRST)
    assert register.read() == SECOND


@pytest.mark.parametrize(
    "late",
    [
        SECOND,
        dataclasses.replace(FIRST, run="another start", epoch=1),
        dataclasses.replace(FIRST, epoch=3),
    ],
)
def test_who_comes_late_or_from_another_start_takes_nothing_over(register: HeadRegister, late: HeadRecord) -> None:
    register.take_over(SECOND)
    with pytest.raises(Superseded):
        register.take_over(late)
    assert register.read() == SECOND


def test_from_a_register_that_is_removed_or_damaged_nobody_takes_over_and_its_coordinator_goes_on(
    register: HeadRegister, tmp_path: Path
) -> None:
    damages = ("", "{", '{"run": "a"}', '{"run": 1, "attempt": 1, "epoch": 0, "host": "", "address": "", "state": 2}')
    for damage in damages:
        (tmp_path / "head.json").write_text(damage)
        assert register.read() is None
        with pytest.raises(Superseded, match="led by nobody"):
            register.take_over(SECOND)
        register.update(FIRST)
        assert register.read() == FIRST
    shutil.rmtree(tmp_path)
    register.update(FIRST)
    register.end(FIRST)
    assert not (tmp_path / "head.json").exists()


def test_a_register_that_the_disk_does_not_give_is_not_overwritten(
    register: HeadRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another coordinator's by now."""

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    register.take_over(SECOND)
    with monkeypatch.context() as patched:
        patched.setattr(head_register, "read_regular", fail)
        assert register.read() is None
        with pytest.raises(OSError, match="Input/output"):
            register.update(FIRST)
    assert register.read() == SECOND


def _try(folder: Path, number: int, barrier: Any, won: Any) -> None:
    barrier.wait()
    try:
        HeadRegister(folder).take_over(dataclasses.replace(SECOND, host=str(number)))
    except Superseded:
        return
    with won.get_lock():
        won.value += 1


@pytest.mark.thorough
def test_of_many_that_take_over_at_once_one_succeeds(register: HeadRegister, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, won = context.Barrier(6), context.Value("i", 0)
    processes = [context.Process(target=_try, args=(tmp_path, number, barrier, won)) for number in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert won.value == 1
    assert (register.read() or FIRST).epoch == 1


def test_a_full_disk_takes_a_change_that_is_not_much_longer(
    register: HeadRegister, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(head_register, "replace_private", full)
    longer = dataclasses.replace(FIRST, state={"hosts": list(range(1000))})
    register.update(longer)
    register.update(FIRST)
    assert register.read() == FIRST
    with pytest.raises(OSError, match="No space"):
        register.update(dataclasses.replace(FIRST, state={"hosts": list(range(100_000))}))
    assert register.read() == FIRST


def test_a_disk_without_locks_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(head_register.fcntl, "fcntl", refuse)
    with pytest.raises(LocksMissing, match="No locks available"):
        HeadRegister(tmp_path).begin(FIRST)


def test_a_register_that_somebody_holds_for_long_is_not_waited_for_without_end(
    register: HeadRegister, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_register, "LOCK_S", 0.1)
    with register._locked(), pytest.raises(TimeoutError, match="has been held"):
        register.update(FIRST)
