"""Deletes checkpoints: keeps the last n, removes what a run does not continue from, and tidies up after crashes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import (
    NewerFormatError,
    candidates,
    is_newer_format,
    is_whole,
    publish,
    remove,
    step_of,
    usable,
)
from paceline.errors import CheckpointError

__all__ = ["Leftovers", "discard", "prune", "tidy"]

IDLE_S = 10.0  # a writer that lives changes its files more often


class Leftovers:
    """Tells saves that their writers have left unfinished from those that are being written.

    What two looks find the same, `IDLE_S` apart by a clock that nobody sets, is nobody's any more. The times of files
    say less: they jump with the clock of a host, and hosts differ.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[object, float]] = {}  # what it was, and since when

    def is_idle(self, path: Path) -> bool:
        """Look at a directory: whether nothing in it has changed for a while; False where that cannot be seen."""
        try:
            found = [(one.name, one.stat()) for one in sorted(path.iterdir())]
        except OSError:
            return False
        look = path.stat().st_mtime_ns, tuple((name, about.st_size, about.st_mtime_ns) for name, about in found)
        before, since = self._seen.get(path, (None, 0.0))
        if before != look:
            self._seen[path] = look, time.monotonic()
            return False
        return time.monotonic() - since >= IDLE_S


def prune(directory: Path, *, keep: int, newest: Path, is_good: Callable[[Path], bool], leftovers: Leftovers) -> None:
    """Delete checkpoints beyond the `keep` newest good ones; never `newest`, which was just committed.

    Damaged ones, by their sizes or because not `is_good`, do not count. They stay for inspection until `keep` good ones
    are newer. Those of a newer Paceline stay. Saves up to this step that are `leftovers` by now are deleted. Raises
    OSError if one cannot be deleted, after deleting all others.
    """
    others = [path for path in candidates(directory) if path != newest]
    others.sort(key=lambda path: (step_of(path), path.name), reverse=True)
    num_good, surplus = 1, list[Path]()
    for path in others:
        complete = is_whole(path)
        if not complete and is_newer_format(path):
            continue
        if not complete and path.suffix:  # being written or deleted, or left so by a process that was lost
            if step_of(path) <= step_of(newest) and leftovers.is_idle(path):
                surplus.append(path)
            continue
        if num_good >= keep:
            if complete or step_of(path) < step_of(newest):  # all that were counted are newer
                surplus.append(path)
        elif complete and is_good(path):
            num_good += 1
    _remove_all(surplus)


def tidy(directory: Path) -> None:
    """Finish what earlier processes left: publish committed `.partial` directories, delete the others."""
    for path in candidates(directory):
        if ".partial-" in path.name:
            try:
                usable(path)
            except NewerFormatError:
                continue
            except CheckpointError:
                remove(path)
            else:
                publish(path)
        elif ".removed-" in path.name:
            remove(path)


def discard(directory: Path, *, after_step: int, keeping: Collection[int] = ()) -> None:
    """Delete what is beyond a step, complete or not (-1: all), except the steps `keeping`; for a run that starts over.

    What a newer Paceline has written stays.

    Raises OSError if one cannot be deleted, after deleting all others.
    """
    steps = {path: step_of(path) for path in candidates(directory) if ".removed-" not in path.name}
    beyond = [path for path, step in steps.items() if step > after_step and step not in keeping]
    _remove_all(path for path in beyond if not is_newer_format(path))


def _remove_all(paths: Iterable[Path]) -> None:
    """Call `remove` for each; raises the first error after all others are deleted."""
    failures = list[OSError]()
    for path in paths:
        try:
            remove(path)
        except OSError as error:
            failures.append(error)
    if failures:
        raise failures[0]
