"""Requests are tried a bounded number of times, and the error says which, how often and what to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.storage.retries import BoundedRetries, StorageError


class NoCredentialsError(Exception):
    """As botocore calls it."""


class HttpError(Exception):
    """As gcsfs calls it."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class HttpResponseError(Exception):
    """As azure.core calls it."""

    def __init__(self, status_code: int, message: str) -> None:
        super().__init__(message)
        self.status_code = status_code


class ResourceNotFoundError(HttpResponseError):
    """As azure.core calls it."""


class ClientAuthenticationError(HttpResponseError):
    """As azure.core calls it."""


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


@pytest.mark.parametrize(
    ("address", "error", "said"),
    [
        ("gs://b/x", OSError("Forbidden: b/x no access"), "GOOGLE_APPLICATION_CREDENTIALS"),
        ("gs://b/x", HttpError(401, "Anonymous caller does not have access"), "gcloud auth application-default login"),
        ("az://b/x", ClientAuthenticationError(403, "AuthenticationFailed"), "AZURE_STORAGE_ACCOUNT_KEY"),
        ("az://b/x", HttpResponseError(403, "AuthorizationFailure"), "AZURE_STORAGE_CONNECTION_STRING"),
    ],
)
def test_what_a_store_does_not_allow_is_told_with_its_own_sources_of_credentials(
    address: str, error: Exception, said: str
) -> None:
    request, calls = fails(100, error)
    with pytest.raises(StorageError, match=said) as caught:
        BoundedRetries(sleep=lambda _: None).call("write", address, request)
    assert len(calls) == 1 and "AWS" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "error"), [("gs://b/x", HttpError(503, "later")), ("az://b/x", HttpResponseError(503, "ServerBusy"))]
)
def test_what_passes_is_tried_again_and_names_the_stores_own_endpoint(address: str, error: Exception) -> None:
    request, calls = fails(100, error)
    with pytest.raises(StorageError, match=r"STORAGE_EMULATOR_HOST|AZURE_STORAGE_CONNECTION_STRING"):
        BoundedRetries(tries=3, sleep=lambda _: None).call("write", address, request)
    assert len(calls) == 3


def test_azures_word_for_what_is_absent_is_pythons() -> None:
    request, calls = fails(100, ResourceNotFoundError(404, "The specified blob does not exist.\nRequestId:1"))
    with pytest.raises(FileNotFoundError, match=r"does not exist\.$"):
        BoundedRetries(sleep=lambda _: None).call("read", "az://b/x", request)
    assert len(calls) == 1
