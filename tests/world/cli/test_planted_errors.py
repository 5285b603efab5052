"""Parity names the module into which an error was planted; all kinds of errors are in tests/long."""

from __future__ import annotations

from pathlib import Path

from planted.trials import ERRORS, FAST, Trials, table


def test_planted_errors_are_caught_and_placed(tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    outcomes = [trials(error) for error in ERRORS if error.what in FAST]
    assert len(outcomes) == len(FAST)
    assert all(one.is_caught and one.is_placed for one in outcomes), table(outcomes)
