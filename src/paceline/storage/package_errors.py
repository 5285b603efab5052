"""Errors of the packages that speak to stores, told by name and number: none of these packages is imported for them."""

from __future__ import annotations

__all__ = ["plain_error"]


def plain_error(error: Exception) -> Exception:
    """Return Python's own error for a package's, where it says that something is absent or not allowed."""
    if isinstance(error, (FileNotFoundError, PermissionError)):
        return error
    names = {each.__name__ for each in type(error).__mro__}
    said = " ".join(str(error).split())
    code = str(getattr(error, "code", None) or getattr(error, "status_code", None))
    if "ResourceNotFoundError" in names:  # azure.core
        return FileNotFoundError(said.partition(" RequestId:")[0])
    if names & {"HttpResponseError", "HttpError"} and code in ("401", "403") and "Invalid Credentials" not in said:
        return PermissionError(said.partition(" RequestId:")[0])
    if type(error) is OSError and said.startswith("Forbidden:"):  # gcsfs
        return PermissionError(said)
    return error
