"""Whose a study in Optuna's storage is: the folder's that has its secret, from whichever host or path it is used.

The secret is a random number in the study's folder. The storage has a hash of it, from which the secret cannot be
found. With the secret as their key, other values can be compared over starts without being in the storage.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from pathlib import Path

from paceline.errors import LaunchError, PlanError
from paceline.private_files import read_private, write_private
from paceline.processes import this_host

__all__ = ["StudyOwner"]

FILE = ".secret"
SECRET_BYTES = 32


class StudyOwner:
    """A study's folder with its secret, which is made where there is none. The process must have the folder's lock."""

    def __init__(self, folder: Path) -> None:
        """Raises PlanError where the secret cannot be read or made."""
        self._folder = folder
        try:
            self._secret = _read(folder) or _made(folder)
        except (OSError, LaunchError) as error:
            raise PlanError(f"{folder / FILE} cannot be used: {error}.") from error

    @property
    def identity(self) -> str:
        """What the storage has of it."""
        return self.fingerprint("identity", "")

    @property
    def place(self) -> str:
        """The folder as people know it: HOST:PATH. It changes where the folder is moved."""
        return f"{this_host()}:{self._folder}"

    def is_copy_of(self, place: str) -> bool:
        """Whether this folder was copied from that place, and that one is still there."""
        host, _, path = place.partition(":")
        other = Path(path)
        if host != this_host() or other == self._folder:
            return False
        try:
            return not other.samefile(self._folder) and _read(other) == self._secret
        except (OSError, LaunchError):
            return False

    def fingerprint(self, name: str, text: str) -> str:
        """A hash that is the same for the same name and text, and from which the text cannot be found or guessed."""
        return hmac.new(self._secret, f"{name}\0{text}".encode(), hashlib.sha256).hexdigest()


def _read(folder: Path) -> bytes | None:
    """The secret of a folder; None where there is none, or a power failure has left half of it."""
    try:
        found = read_private(folder / FILE)
    except FileNotFoundError:
        return None
    return found if len(found) == SECRET_BYTES else None


def _made(folder: Path) -> bytes:
    secret, temporary = secrets.token_bytes(SECRET_BYTES), folder / f"{FILE}.new"
    write_private(temporary, secret)
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    temporary.replace(folder / FILE)
    return secret
