"""Deletes checkpoints: keeps the last n, removes what a run does not continue from, and tidies up after crashes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import candidates, is_whole, publish, remove, step_of, usable
from paceline.errors import CheckpointError

__all__ = ["discard", "prune", "tidy"]


def prune(directory: Path, *, keep: int, newest: Path, is_good: Callable[[Path], bool]) -> None:
    """Delete checkpoints beyond the `keep` newest good ones; never `newest`, which was just committed.

    Damaged ones, by their sizes or because not `is_good`, do not count. They stay for inspection until `keep` good ones
    are newer. Raises OSError if one cannot be deleted, after deleting all others.
    """
    others = [path for path in candidates(directory) if path != newest]
    others.sort(key=lambda path: (step_of(path), path.name), reverse=True)
    num_good, surplus = 1, list[Path]()
    for path in others:
        complete = is_whole(path)
        if not complete and path.suffix:  # it may be being written or deleted
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
            except CheckpointError:
                remove(path)
            else:
                publish(path)
        elif ".removed-" in path.name:
            shutil.rmtree(path)


def discard(directory: Path, *, after_step: int, keeping: Collection[int] = ()) -> None:
    """Delete what is beyond a step, complete or not (-1: all), except the steps `keeping`; for a run that starts over.

    Raises OSError if one cannot be deleted, after deleting all others.
    """
    steps = {path: step_of(path) for path in candidates(directory) if ".removed-" not in path.name}
    _remove_all(path for path, step in steps.items() if step > after_step and step not in keeping)


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
