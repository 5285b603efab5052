"""Addresses of object storage: `s3://bucket/path`, `gs://`, `az://`, and every other protocol that fsspec knows.

Credentials are no part of an address: they come from where the store's own package looks for them.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import PurePath

from paceline.errors import PlanError

__all__ = ["check_address", "family_of", "is_address", "joined", "plain_path"]

# By protocol: the package that speaks it, and the extra of paceline that installs it.
PACKAGES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gs"),
    "gcs": ("gcsfs", "gs"),
    "az": ("adlfs", "az"),
    "abfs": ("adlfs", "az"),
    "abfss": ("adlfs", "az"),
}
LOCAL = ("file", "local")
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)", re.DOTALL)


def is_address(text: object) -> bool:
    """Whether this names a place in object storage, and no path of a file system."""
    return isinstance(text, str) and _ADDRESS.fullmatch(text) is not None


def plain_path(text: str | PurePath) -> str | None:
    """Return the address in a text; None for paths, which `pathlib` has taken one slash from (`s3:/bucket`)."""
    found = re.fullmatch(r"([a-z][a-z0-9+.-]*):/+(.*)", str(text), re.DOTALL)
    known = found is not None and (found[1] in PACKAGES or found[1] in LOCAL or "://" in str(text))
    if found is None or not known:
        return None
    return f"{found[1]}:///{found[2]}" if found[1] in LOCAL else f"{found[1]}://{found[2]}"


def family_of(address: str) -> str:
    """Return which store an address is of: "s3", "gs", "az", or "" for every other."""
    return PACKAGES.get(address.partition("://")[0], ("", ""))[1]


def joined(address: str, *names: str) -> str:
    """Return the address of something below another one."""
    return "/".join((address.rstrip("/"), *names))


def check_address(address: str, *, option: str) -> str:
    """Return an address without a trailing slash, after importing nothing: PlanError where it cannot be used here.

    `option` names in errors what the user has written.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None:
        raise PlanError(
            f"{option} is {address!r}; it must be an address such as 's3://bucket/runs/first' (also gs://, az://)."
        )
    protocol, rest = found[1], found[2].rstrip("/")
    place, _, path = rest.partition("/")
    if "@" in place and protocol in ("s3", "s3a", "gs", "gcs"):
        raise PlanError(
            f"{option} names a user or a key before '@'. Addresses are written into records: give credentials as "
            f"{protocol}'s own tools take them (environment, profile, role), and leave them out here."
        )
    if "?" in rest or "#" in rest:
        raise PlanError(f"{option} has '?' or '#' in it; it must be a plain address such as 's3://bucket/runs/first'.")
    if protocol not in LOCAL and (not place or not path.strip("/")):
        raise PlanError(
            f"{option} is {address!r}; it must name a bucket and a place of its own in it, such as "
            f"'{protocol}://{place or 'bucket'}/runs/first'."
        )
    _require_package(protocol, option)
    return f"{protocol}://{rest}"


def _require_package(protocol: str, option: str) -> None:
    package, extra = PACKAGES.get(protocol, ("fsspec", "s3"))
    for needed in dict.fromkeys(("fsspec", package)):
        if importlib.util.find_spec(needed) is None:
            raise PlanError(
                f"{option} needs the package {needed} for {protocol}://, which this Python does not have: "
                f"pip install 'paceline[{extra}]'."
            )
    if protocol in PACKAGES or protocol in LOCAL:
        return
    from fsspec.registry import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise PlanError(f"{option} cannot use {protocol}://: {error}. Known are s3://, gs:// and az://.") from error
