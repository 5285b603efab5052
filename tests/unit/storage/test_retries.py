"""Requests are tried a bounded number of times, and the error says which, how often and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.storage.retries import BoundedRetries, StorageError


class NoCredentialsError(Exception):
    """As botocore calls it."""


def fails(times: int, error: Exception) -> tuple[Callable[[], str], list[int]]:
    calls: list[int] = []

    def request() -> str:
        calls.append(len(calls))
        if len(calls) <= times:
            raise error
        return "answer"

    return request, calls


def test_a_request_that_fails_for_a_while_is_answered() -> None:
    pauses: list[float] = []
    request, calls = fails(3, OSError("SlowDown"))
    retries = BoundedRetries(tries=5, first_s=1.0, longest_s=2.0, sleep=pauses.append)
    assert retries.call("read", "s3://b/x", request) == "answer" and len(calls) == 4
    assert [0.5 <= pause <= 1.0 for pause in pauses[:1]] == [True] and all(1.0 <= pause <= 2.0 for pause in pauses[1:])


def test_tries_are_bounded_and_the_error_says_what_failed() -> None:
    request, calls = fails(100, OSError("the connection was reset"))
    with pytest.raises(StorageError, match=r"could not write s3://b/x \(4 tries\): OSError: the connection was reset"):
        BoundedRetries(tries=4, sleep=lambda _: None).call("write", "s3://b/x", request)
    assert len(calls) == 4


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (PermissionError("Access Denied"), "may list, read, write and delete"),
        (NoCredentialsError("none"), "AWS_PROFILE"),
    ],
)
def test_what_does_not_pass_is_not_tried_again(error: Exception, remedy: str) -> None:
    request, calls = fails(100, error)
    with pytest.raises(StorageError, match=remedy) as caught:
        BoundedRetries(sleep=lambda _: None).call("write", "s3://b/x", request)
    assert len(calls) == 1 and "(1 try)" in str(caught.value)


def test_an_object_that_is_not_there_is_the_callers_to_judge() -> None:
    request, calls = fails(100, FileNotFoundError("x"))
    with pytest.raises(FileNotFoundError):
        BoundedRetries(sleep=lambda _: None).call("read", "s3://b/x", request)
    assert len(calls) == 1
