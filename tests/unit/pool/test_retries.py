"""What has failed is tried again after waits that double, up to a limit, until it is well."""

from __future__ import annotations

import time

import pytest

from paceline.pool import retries
from paceline.pool.retries import Retries


def test_waits_double_up_to_the_limit_and_begin_anew_when_it_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(retries.time, "monotonic", lambda: now)
    tries = Retries[str](first_s=10.0, most_s=35.0)
    assert tries.is_due("a")
    for wait_s in (10.0, 20.0, 35.0, 35.0):
        assert tries.failed("a") == wait_s
        now += wait_s - 0.1
        assert not tries.is_due("a") and tries.is_due("b")
        now += 0.2
        assert tries.is_due("a")
    tries.forget("a")
    assert tries.failed("a") == 10.0
    for _ in range(5000):
        tries.failed("a")
    assert tries.failed("a") == 35.0
