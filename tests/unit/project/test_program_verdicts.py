"""What the table of programs and plans takes for a refusal: a `raise` of ours that names a remedy, and nothing else."""

from __future__ import annotations

import importlib
import inspect
import traceback
from pathlib import Path
from typing import Any

import pytest

from paceline.comm.remote_tensors import sparse_rows
from paceline.plan import Plan

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("trials.verdicts")


def failed(call: Any) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return "".join(traceback.format_exception(caught.value))


def test_a_sentence_of_ours_with_a_remedy_is_a_refusal_and_what_follows_it_is_none(verdicts: Any) -> None:
    ours = failed(lambda: Plan.parse("replicas=0"))
    follows = ours.replace("paceline.errors.PlanError", "paceline.errors.SyncError")
    assert verdicts.judged({0: ours, 1: follows}).state == "refused"
    assert verdicts.judged({0: follows}).state == "CRASH"


def test_torchs_words_under_our_frames_are_a_crash_also_beside_a_refusal(verdicts: Any) -> None:
    import torch

    ours = failed(lambda: Plan.parse("replicas=0"))
    torchs = failed(lambda: sparse_rows(torch.zeros(1, dtype=torch.long), torch.zeros(2, 3), (1, 1)))
    assert str(inspect.getsourcefile(sparse_rows)) in torchs
    assert verdicts.judged({0: torchs}).state == "CRASH"
    assert verdicts.judged({0: ours, 1: torchs}).state == "CRASH"


def test_a_refusal_without_a_remedy_is_a_crash_and_a_worker_without_an_error_hangs(verdicts: Any) -> None:
    line = next(n for n, text in enumerate(inspect.getsource(Plan).splitlines()) if "raise" in text)
    first = inspect.getsourcelines(Plan)[1] + line
    text = f'Traceback (most recent call last):\n  File "{inspect.getsourcefile(Plan)}", line {first}, in x\n    x\n'
    assert verdicts.judged({0: f"{text}ValueError: this is not so"}).state == "CRASH"
    assert verdicts.judged({0: f"{text}ValueError: this is not so. Use that"}).state == "refused"
    assert verdicts.judged({0: "status 9\n"}).state == "HANG"
