"""Tries a request a bounded number of times, with growing pauses; says what failed, how often, and what to do."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable
from typing import TypeVar

from paceline.errors import PacelineError
from paceline.storage.address import family_of
from paceline.storage.package_errors import plain_error

__all__ = ["BoundedRetries", "StorageError", "remedy_for"]

T = TypeVar("T")

# Classes of errors that do not pass by themselves, by name: no package of a store is imported for them.
LASTING = frozenset(
    {
        "AuthenticationRequiredError",
        "ClientAuthenticationError",
        "CredentialRetrievalError",
        "DefaultCredentialsError",
        "InvalidConfigError",
        "InvalidRegionError",
        "NoCredentialsError",
        "NoRegionError",
        "ParamValidationError",
        "PartialCredentialsError",
        "ProfileNotFound",
        "TokenRetrievalError",
        "UnauthorizedSSOTokenError",
    }
)
CREDENTIALS = LASTING - {"InvalidRegionError", "NoRegionError", "ParamValidationError", "InvalidConfigError"} | {
    "RefreshError"  # of Google's, also where the network is away: it is tried again
}
SOURCES = {  # of credentials, by store
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, a role of the machine",
    "gs": ("`gcloud auth application-default login`, GOOGLE_APPLICATION_CREDENTIALS, a service account of the machine"),
    "az": (
        "AZURE_STORAGE_CONNECTION_STRING, AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or "
        "AZURE_STORAGE_SAS_TOKEN, a managed identity"
    ),
}
ENDPOINTS = {"s3": "AWS_ENDPOINT_URL", "gs": "STORAGE_EMULATOR_HOST", "az": "AZURE_STORAGE_CONNECTION_STRING"}


class StorageError(PacelineError):
    """A request to object storage failed for good: it names the object, the number of tries, and the remedy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundedRetries:
    """How often a request is tried, and how long is waited in between."""

    tries: int = 6
    first_s: float = 0.5
    longest_s: float = 20.0
    sleep: Callable[[float], object] = time.sleep

    def call(self, what: str, address: str, request: Callable[[], T]) -> T:
        """Return what the request returns; `what` it does, such as "write", for the error.

        Raises FileNotFoundError where the object is not there, StorageError for all else, after the last try.
        """
        for number in range(1, self.tries + 1):
            try:
                return request()
            except StorageError:
                raise
            except Exception as raised:  # each store's package has errors of its own
                error = plain_error(raised)
                if isinstance(error, FileNotFoundError):
                    raise error from (raised if error is not raised else raised.__cause__)
                if number == self.tries or is_lasting(error):
                    raise StorageError(_failure(what, address, number, error)) from error
            pause_s = min(self.longest_s, self.first_s * 2 ** (number - 1))
            self.sleep(pause_s * (0.5 + random.random() / 2))  # many hosts do not come back at the same instant
        raise AssertionError("a bounded loop returns or raises")


def is_lasting(error: BaseException) -> bool:
    """Whether trying again is in vain: the store has answered that it will not, or nothing can be asked at all."""
    names = {each.__name__ for each in type(error).__mro__}
    return bool(names & LASTING) or isinstance(error, (PermissionError, TypeError, ImportError, MemoryError))


def remedy_for(error: BaseException, address: str) -> str:
    """Return what a user can do about an error of the store that an address names."""
    names = {each.__name__ for each in type(error).__mro__}
    family = family_of(address) or "s3"
    if names & CREDENTIALS or getattr(error, "code", None) in (401, "401"):
        return f"Give credentials as the store's own tools take them: {SOURCES[family]}, or FSSPEC_* variables."
    if isinstance(error, PermissionError):
        return (
            "Check the credentials, and that they may list, read, write and delete there. They are taken from: "
            f"{SOURCES[family]}, or FSSPEC_* variables."
        )
    return f"Check the network, and the address of the store ({ENDPOINTS[family]}, where it is not the provider's own)."


def _failure(what: str, address: str, tries: int, error: BaseException) -> str:
    said = " ".join(str(error).split()) or type(error).__name__
    times = "1 try" if tries == 1 else f"{tries} tries"
    return f"could not {what} {address} ({times}): {type(error).__name__}: {said[:300]}. {remedy_for(error, address)}"
