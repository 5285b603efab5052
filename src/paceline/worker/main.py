"""A worker process from its first to its last instruction: the entry that launchers call by name."""

from __future__ import annotations

import faulthandler
import importlib
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from paceline import environment
from paceline.errors import PlanError, writing
from paceline.plan.job import Assignment
from paceline.private_files import read_private, write_private
from paceline.worker.membership.clean_exit import CleanExit
from paceline.worker.program_worker import ending_with_program
from paceline.worker.record.error_report import write_error
from paceline.worker.record.flight_recording import dump_stacks_on_signal
from paceline.worker.session import has_run, run_worker

__all__ = ["work"]

# By name: they are above this room.
COMPAT = "paceline.compat"
TORCH_PROGRAMS = "paceline.compat.torch_programs.program"


def work(assignment: Assignment) -> int:
    """Run the job's program as this worker; returns the exit status: 0, 1 (an error), 2 (a wrong plan or job)."""
    faulthandler.enable()
    dump_stacks_on_signal(assignment.worker_dir)
    _settle_breakpoints(assignment)
    environment.enter(assignment)
    try:
        if assignment.job.program:
            _run_script(assignment)
        else:
            _run_function(assignment)
    except SystemExit as stop:
        return _exit_status(stop, assignment)
    except KeyboardInterrupt:
        if assignment.job.launcher == "inline" and assignment.rank == 0:  # the user's own, which ends the run
            raise
        return 128 + signal.SIGINT
    except BaseException as error:  # the process boundary: reported in error.json ...
        write_error(error, assignment, step=0)
        if assignment.job.launcher != "inline" or assignment.rank > 0:  # there the console is this process's own
            sys.excepthook(type(error), error, error.__traceback__)  # ... and in stderr.log
        return 2 if isinstance(error, PlanError) else 1
    return 0


def _settle_breakpoints(assignment: Assignment) -> None:
    """A worker in a process of its own has no terminal: pdb would end at once, on every worker."""
    if assignment.job.launcher == "inline":
        if assignment.rank != 0:
            sys.breakpointhook = lambda *_, **__: None  # worker 0 has the debugger; the others wait for it
        return

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("breakpoint() needs a terminal: use launcher='inline' (--launcher inline), for worker 0")

    sys.breakpointhook = refuse


def _run_script(assignment: Assignment) -> None:
    """Run a script as `python script.py` would; its paceline.run(...) finds that it is in a worker, and so does what
    joins a program that has a loop of its own.
    """
    path = assignment.job.program
    sys.argv = [path, *assignment.job.args]
    sys.path.insert(0, str(Path(path).resolve().parent))
    importlib.import_module(TORCH_PROGRAMS).prepare_program(assignment)
    if assignment.job.run_as is not None:
        importlib.import_module(f"{COMPAT}.{assignment.job.run_as}.program").prepare_program(assignment)
    with ending_with_program():
        runpy.run_path(path, run_name="__main__")
    if not has_run(assignment):
        raise PlanError(
            f"{path} ended without becoming a worker: there was nothing to train. End the script with: "
            'if __name__ == "__main__": paceline.run(train). A program of another framework becomes one where it '
            "begins to be distributed, by torch.distributed.init_process_group() or as "
            f"`paceline migrate --check {path}` says."
        )


def _run_function(assignment: Assignment) -> None:
    """Run the function that paceline.run(fn) was called with; its value goes back to the caller through a file."""
    program = Path(assignment.run_dir) / f"attempt_{assignment.attempt}" / "program.pkl"
    function, fields = cloudpickle.loads(read_private(program))  # written by the caller's own process, on this host
    value: Any = None
    try:
        value = run_worker(function, assignment, fields=fields)
    except SystemExit as stop:
        if stop.code or isinstance(stop, CleanExit):  # a worker that leaves before the end returns nothing
            raise
    # In an elastic run any worker may be the first at its end: the caller takes the value of the one that is.
    if assignment.rank == 0 or assignment.plan.over(None).layout.is_elastic:
        result = Path(assignment.worker_dir) / "result.pkl"
        pickled = cloudpickle.dumps(value)
        with writing(result):
            write_private(result, pickled)


def _exit_status(stop: SystemExit, assignment: Assignment) -> int:
    if stop.code is None or stop.code == 0:
        return 0
    if isinstance(stop, CleanExit):
        return int(str(stop.code))
    write_error(stop, assignment, step=0)
    return stop.code if isinstance(stop.code, int) else 1
