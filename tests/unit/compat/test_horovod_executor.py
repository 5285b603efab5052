"""What carries out Horovod's verdicts, in the thread that waits for a result."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.compat.horovod.errors import HorovodInternalError
from paceline.compat.horovod.executor import Executor
from paceline.compat.horovod.pending_op import PendingOp
from paceline.compat.horovod.requests import Kind, OpRequest, OpVerdict


class InterruptedGroup:
    def __init__(self, error: BaseException) -> None:
        self._error = error

    def barrier(self) -> None:
        raise self._error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("it broke")])
def test_whatever_breaks_a_collective_fails_its_operation_and_all_that_come(error: BaseException) -> None:
    op = PendingOp(request=OpRequest(name="barrier", kind=Kind.BARRIER))
    failed: list[str] = []
    executor = Executor(
        rank=0,
        take=lambda set_id, name: op,
        meet=lambda set_id, ranks: pytest.fail("no set is added"),
        fail=failed.append,
        observe=lambda verdict, began_s, ended_s: None,
    )
    group: Any = InterruptedGroup(error)
    executor._groups[0] = group  # the thread of the executor is not started: this one carries it out
    executor.follow(OpVerdict(kind=Kind.BARRIER, names=("barrier",)))
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            executor.help_until_done(op)
    else:
        executor.help_until_done(op)
    reason = f"barrier of barrier has failed: {str(error) or 'KeyboardInterrupt'}"
    assert op.is_done
    assert isinstance(op.error, HorovodInternalError)
    assert failed == [str(op.error)] == [reason]
