"""A fault is told once while it lasts, and again where it comes back."""

from __future__ import annotations

import pytest

from paceline.pool import notices
from paceline.pool.notices import QUIET_S, Notices


def test_a_fault_that_comes_back_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[str]()
    monkeypatch.setattr(notices.time, "monotonic", lambda: now[0])
    say_once = Notices(said.append)
    for _ in range(10):  # it lasts
        say_once("the disk is full")
        now[0] += QUIET_S - 1
    say_once("a node is gone")
    assert said == ["the disk is full", "a node is gone"]
    now[0] += 2
    say_once("the disk is full")
    say_once("a node is gone")
    assert said == ["the disk is full", "a node is gone", "the disk is full"]
