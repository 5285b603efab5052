"""In which order the rounds of several buckets begin: by departures alone, whatever arrives when."""

from __future__ import annotations

from typing import Any, cast

import pytest

from paceline.comm.group import Disrupted
from paceline.sync.allreduce.bucket_pipeline import BucketPipeline
from paceline.sync.allreduce.buckets import Bucket


class Pretended:
    """A bucket of so many rounds, which writes down when each begins."""

    waited_s = 0.0  # where a round was sent

    def __init__(self, name: str, num_rounds: int, log: list[str]) -> None:
        self.name, self._left, self._begun, self._log = name, num_rounds, 0, log

    @property
    def may_send_more(self) -> bool:
        return self._left > 1

    def depart(self) -> None:
        self._begun = 1
        self._log.append(f"{self.name}1")

    def advance(self) -> bool:
        self._left -= 1
        if self.name == "x":
            raise Disrupted("worker 2 has ended")
        if not self._left:
            self._log.append(f"{self.name} landed")
            return False
        self._begun += 1
        self._log.append(f"{self.name}{self._begun}")
        return True


def relayed(*num_rounds: int, names: str = "abcdef") -> tuple[list[str], BucketPipeline]:
    log: list[str] = []
    relay = BucketPipeline()
    relay.begin()
    for name, count in zip(names, num_rounds, strict=False):
        bucket = Pretended(name, count, log)
        bucket.depart()
        relay.departed(cast("Bucket", cast("Any", bucket)))
    return log, relay


def test_later_rounds_begin_two_departures_after_the_one_before() -> None:
    log, relay = relayed(2, 2, 3, 2, 2)
    assert log == ["a1", "b1", "c1", "a2", "d1", "b2", "e1", "c2"]
    relay.finish()
    assert log[8:] == ["a landed", "b landed", "c3", "d2", "e2", "c landed", "d landed", "e landed"]


@pytest.mark.parametrize("count", [1, 4])
def test_nobody_waits_in_backward_for_the_answer_of_a_last_round(count: int) -> None:
    log, relay = relayed(*[1] * count)
    assert log == [f"{name}1" for name in "abcd"[:count]]
    relay.finish()
    assert log[count:] == [f"{name} landed" for name in "abcd"[:count]]


def test_what_was_waited_for_where_a_bucket_left_counts_as_waiting() -> None:
    relay, bucket = BucketPipeline(), Pretended("a", 1, [])
    bucket.depart()
    bucket.waited_s = 0.5
    relay.begin()
    relay.departed(cast("Bucket", cast("Any", bucket)))
    assert relay.waited_s == 0.5
    relay.begin()
    assert relay.waited_s == 0.0


def test_a_pass_that_was_left_is_forgotten() -> None:
    log, relay = relayed(2, 2)
    relay.begin()
    relay.finish()
    assert log == ["a1", "b1"]


def test_a_loss_that_is_noticed_in_backward_is_raised_at_the_end_of_the_pass_and_forgotten_with_it() -> None:
    log, relay = relayed(3, 3, 3, 3, names="xbcd")
    assert log == ["x1", "b1", "c1", "d1"], "nobody takes a further round"
    with pytest.raises(Disrupted, match="worker 2 has ended"):
        relay.check()
    relay.begin()
    relay.check()
