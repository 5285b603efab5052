"""`save_state` and `load_state`: checkpoints of the run, which are also put where the program wants them."""

from __future__ import annotations

import shutil
from pathlib import Path

from paceline.checkpoint.checkpoint_dir import find
from paceline.compat.accelerate.program_state import ProgramState
from paceline.compat.accelerate.utils import ProjectConfiguration
from paceline.compat.publishing import fill_directory
from paceline.errors import CheckpointError
from paceline.events import Note, Warned
from paceline.worker.data.random_state import restore_random_state
from paceline.worker.run_member import parts_of
from paceline.worker.stateful_member import loop_of
from paceline.worker.worker import Worker

__all__ = ["latest_directory", "load_state", "next_directory", "save_state"]


def save_state(worker: Worker, directory: Path) -> None:
    """Save a checkpoint of the run, and put it into a directory: by links where that is possible, else by copies.

    Where the first worker has all of the state it needs no other: programs may call this on it alone. What it cannot
    write in a quarter of the workers' limit it writes while steps go on. Else it is an operation of all workers, which
    waits for the end. Raises RuntimeError inside a step, and CheckpointError where it cannot be written.
    """
    parts = parts_of(worker)
    if loop_of(worker).between.can_save_alone:
        parts.collectives.require_together("accelerator.save_state()")
        if worker.is_first:
            _save_alone(worker, directory)
        return
    worker.save()
    parts.place.consensus.run(parts.saver.wait)
    said = worker.gather(_publish(parts.files.checkpoint_dir, directory, step=worker.step) if worker.is_first else "")
    if said[0]:
        raise CheckpointError(said[0])


def _save_alone(worker: Worker, directory: Path) -> None:
    """Save on the first worker. What takes longer than the others can wait is written while training goes on."""
    files, step, said = parts_of(worker).files, worker.step, list[str]()

    def publish() -> None:
        said.append(_publish(files.checkpoint_dir, directory, step=step))
        if said[0]:
            files.emit(Warned(text=said[0]))  # nobody may wait for it any more

    if not loop_of(worker).between.save_alone(publish):
        files.emit(Note(text=f"{directory} is not complete yet: the state of step {step} is written while steps go on"))
    elif said[0]:
        raise CheckpointError(said[0])


def load_state(worker: Worker, directory: Path, state: ProgramState) -> None:
    """Go on from a state that was saved, on any number of workers. An operation of all workers."""
    worker.restore(str(directory))
    if state.random is not None:
        restore_random_state(state.random)


def next_directory(worker: Worker, project: ProjectConfiguration) -> Path:
    """Where a state goes under automatic names; older ones than `total_limit` allows are removed.

    Its number is above those of all states that are there, also those of earlier attempts of the program: so the
    highest number is the newest state, and none is written over. An operation of all workers, as under Accelerate.
    """
    if worker.is_first:
        states = _states(project)
        if states:
            project.iteration = max(project.iteration, 1 + _number(states[-1]))
        if project.total_limit is not None:
            for path in states[: max(0, len(states) + 1 - project.total_limit)]:
                shutil.rmtree(path)
    project.iteration = worker.gather(project.iteration)[0]
    return _folder(project) / f"checkpoint_{project.iteration}"


def latest_directory(project: ProjectConfiguration) -> Path:
    """The newest state under automatic names; raises CheckpointError where there is none."""
    states = _states(project)
    if not states:
        raise CheckpointError(
            f"{_folder(project)} has no checkpoint_0, checkpoint_1, ...: give load_state() a directory"
        )
    return states[-1]


def _folder(project: ProjectConfiguration) -> Path:
    return Path(project.project_dir or ".") / "checkpoints"


def _states(project: ProjectConfiguration) -> list[Path]:
    """The states under automatic names, the newest last."""
    found = [path for path in _folder(project).glob("checkpoint_*") if path.name.rpartition("_")[2].isdecimal()]
    return sorted(found, key=_number)


def _number(state: Path) -> int:
    return int(state.name.rpartition("_")[2])


def _publish(checkpoints: Path, directory: Path, *, step: int) -> str:
    """Put the checkpoint of a step into a directory; returns what went wrong, or ""."""
    found = find(checkpoints)
    if found.newest is None or found.step != step:
        return f"{directory}: the run's checkpoint of step {step} was not completed in {checkpoints}"
    try:
        fill_directory(found.newest, directory)
    except (OSError, CheckpointError) as error:
        return f"{directory} could not be written: {error}"
    return ""
