"""What an engine saves and loads: a checkpoint of the run, with the program's own `client_state` beside it.

save_dir/latest                      the tag that was saved last
save_dir/TAG/step_00000100/          the run's checkpoint, for any number of workers and any layout
    client_state.pt                  in it: plain values, and tensors
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint.checkpoint_dir import find, whole_file
from paceline.checkpoint.state_tree import decode_state, encode_state, freeze
from paceline.compat.deepspeed.original_checkpoints import is_original
from paceline.compat.publishing import publish_checkpoint
from paceline.errors import CheckpointError
from paceline.regular_files import read_regular
from paceline.worker.run_member import parts_of
from paceline.worker.worker import Worker

__all__ = ["EngineCounts", "SavedEngine", "load_engine", "save_engine"]

LATEST, CLIENT = "latest", "client_state.pt"


class EngineCounts:
    """An engine's counters, as a part of the run's state."""

    def __init__(self) -> None:
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0

    def state_dict(self) -> dict[str, int]:
        """For a checkpoint."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Count on from a checkpoint."""
        for name in vars(self):
            setattr(self, name, int(state[name]))


class SavedEngine:
    """What a program wants to save, as it was when it said so. Raises CheckpointError for a tag that is no name of a
    folder, and for a client state with more than plain values and tensors."""

    def __init__(self, folder: Path, tag: str, client_state: dict[str, Any], *, is_latest: bool) -> None:
        if not tag or tag in (".", "..") or "/" in tag or "\0" in tag:
            raise CheckpointError(
                f"save_checkpoint({str(folder)!r}, tag={tag!r}): the tag must be the name of a folder"
            )
        self.folder, self.tag, self.is_latest = folder, tag, is_latest
        self.client = encode_state(freeze(client_state))


def save_engine(worker: Worker, save: SavedEngine) -> None:
    """Save a checkpoint of the run, and put it with the client state into `folder/tag`; an operation of all workers.

    Raises CheckpointError, on all workers, where the first one cannot write.
    """
    parts = parts_of(worker)
    worker.save()
    parts.place.consensus.run(parts.saver.wait)
    problem: str | None = None
    if worker.is_first:
        source = parts.files.checkpoint_dir / f"step_{worker.step:08d}"
        try:
            _put(source, save)
        except (CheckpointError, OSError) as error:
            problem = str(error)
    problem = worker.gather(problem)[0]
    if problem is not None:
        raise CheckpointError(f"save_checkpoint({str(save.folder)!r}, tag={save.tag!r}): {problem}")


def _put(source: Path, save: SavedEngine) -> None:
    publish_checkpoint(source, save.folder / save.tag, beside={CLIENT: save.client})
    if save.is_latest:
        with whole_file(save.folder / LATEST) as file:
            file.write(save.tag.encode())


def load_engine(
    worker: Worker,
    folder: Path,
    tag: str | None,
    convert: Callable[[Path, Path], tuple[Path, dict[str, Any]]],
    *,
    fresh_optimizer: Optimizer | None,
    fresh_schedule: Any,
    fresh_counts: EngineCounts | None,
) -> tuple[str | None, dict[str, Any]]:
    """Have the run go on from what `save_engine` wrote, or DeepSpeed itself; an operation of all workers.
    `convert(source, directory)` makes what DeepSpeed wrote a checkpoint of the run. `fresh_...`: what begins anew.

    Returns the folder and its client state; (None, {}) where `folder` says no latest tag.
    """
    options = None if fresh_optimizer is None else [dict(group) for group in fresh_optimizer.param_groups]
    schedule = dict(fresh_schedule.state_dict()) if fresh_schedule is not None else None
    counts = None if fresh_counts is None else fresh_counts.state_dict()
    with contextlib.ExitStack() as stack:
        found: tuple[str, str, dict[str, Any]] | str | None = None
        if worker.is_first:
            try:
                target = _target(folder, tag)
                if target is not None and is_original(target):
                    run_dir = parts_of(worker).files.checkpoint_dir.parent
                    place = stack.enter_context(tempfile.TemporaryDirectory(prefix=".deepspeed_", dir=run_dir))
                    checkpoint, client_state = convert(target, Path(place))
                    found = str(target), str(checkpoint), client_state
                elif target is not None:
                    found = _find(target)
            except (CheckpointError, OSError) as error:
                found = str(error)
        found = worker.gather(found)[0]
        if isinstance(found, str):
            raise CheckpointError(f"load_checkpoint({str(folder)!r}, tag={tag!r}): {found}")
        if found is None:
            return None, {}
        worker.restore(found[1])
    if fresh_optimizer is not None and options is not None:
        fresh_optimizer.state.clear()
        for group, before in zip(fresh_optimizer.param_groups, options, strict=True):
            group.update({key: value for key, value in before.items() if key != "params"})
    if fresh_schedule is not None and schedule is not None:
        fresh_schedule.load_state_dict(schedule)
    if fresh_counts is not None and counts is not None:
        fresh_counts.load_state_dict(counts)
    return found[0], found[2]


def _target(folder: Path, tag: str | None) -> Path | None:
    """The folder of a tag; None where no tag is named, and none is the latest."""
    if tag is None:
        latest = folder / LATEST
        if not latest.exists():
            return None
        tag = read_regular(latest).decode().strip()
    return folder / tag


def _find(target: Path) -> tuple[str, str, dict[str, Any]]:
    """A folder, the run's checkpoint in it, and the client state."""
    checkpoint = find(target).newest
    if checkpoint is None:
        raise CheckpointError(f"there is no complete checkpoint in {target}")
    client = checkpoint / CLIENT
    return str(target), str(checkpoint), decode_state(read_regular(client)) if client.exists() else {}
