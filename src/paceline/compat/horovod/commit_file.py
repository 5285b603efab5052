"""Commits of an elastic function in the run's directory: from the newest one all workers go on when they start again.

A thread writes them, the newest first: a commit that comes while one is being written replaces another that waits.
"""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import torch

from paceline.errors import writing

__all__ = ["CommitFile"]

LONGEST_NAME = 200  # bytes of a function's name: file systems take 255 with the rest


class CommitFile:
    """The file of one function of a run. One worker writes it, reads it when all begin, and removes it.

    `call`: which call of the function in its process this is, from 1; commits of other calls do not count.
    `command`: the process that starts the run's workers, again after a loss. With `is_fresh`, commits of earlier ones
    do not count.
    """

    def __init__(self, run_dir: Path, function: str, *, call: int, command: int, is_fresh: bool) -> None:
        name = re.sub(r"[^\w.]", "", function)  # without the <> of <locals> and <lambda>
        name = name.encode()[-LONGEST_NAME:].decode(errors="ignore")
        self._path = run_dir / f"horovod_commit.{name}.pt"
        self._call, self._command, self._is_fresh = call, command, is_fresh
        self._news = threading.Condition()
        self._next: Any = None
        self._is_writing = False
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def read(self) -> Any:
        """Return the newest commit, None where there is none."""
        if not self._path.exists():
            return None
        # The run's own file, in its private directory: it holds whatever objects the program commits.
        found = torch.load(self._path, map_location="cpu", weights_only=False)
        is_earlier = self._is_fresh and found["command"] != self._command
        return None if is_earlier or found["call"] != self._call else found["commit"]

    def write(self, commit: Any) -> None:
        """Have a commit written. Raises RunFileError where an earlier one could not be."""
        with self._news:
            if self._error is not None:
                raise self._error
            self._next = commit
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="paceline-horovod-commit", daemon=True)
                self._thread.start()
            self._news.notify_all()

    def wait(self) -> None:
        """Return when the newest commit is written. Raises RunFileError where it could not be."""
        self._settle()
        if self._error is not None:
            raise self._error

    def remove(self) -> None:
        """Remove the file, once nothing more is written to it: the function has come to its end."""
        self._settle()
        with self._news:
            self._thread = None  # which ends
            self._news.notify_all()
        self._path.unlink(missing_ok=True)

    def _settle(self) -> None:
        with self._news:
            self._news.wait_for(lambda: self._error is not None or (self._next is None and not self._is_writing))

    def _serve(self) -> None:
        while True:
            with self._news:
                self._is_writing = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._next is not None or self._thread is None)
                if self._next is None:
                    return
                commit, self._next, self._is_writing = self._next, None, True
            try:
                self._write(commit)
            except Exception as error:  # raised at the next commit
                with self._news:
                    self._error, self._is_writing = error, False
                    self._news.notify_all()
                return

    def _write(self, commit: Any) -> None:
        temporary = self._path.with_suffix(".new")
        with writing(self._path):
            with temporary.open("wb") as file:
                torch.save({"command": self._command, "call": self._call, "commit": commit}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
