"""The worker's side of a programme of faults: follows the places that its worker passes, and triggers the faults there.

The user's program is not changed. The places are what the worker writes to its flight recorder
(`paceline.comm.flight_recorder`) and, where that is not enough, the functions that write a checkpoint. A fault comes at
its place. Where the worker does not pass that place (it has no micro-batch, or is alone), the fault comes at the next
place of the step.

What a worker cannot do to itself (pull a cable, fill a disk, kill the whole run) it asks of the process that started
the run (`paceline.testing.runs`), and waits until it is done. A file for each fault records that it came, and when.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import os
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.comm.flight_recorder import FlightRecorder
from paceline.testing.corruption import ModelCalls, flip_a_bit, poisoned
from paceline.testing.drill_folder import DrillFolder
from paceline.testing.faults import EXCHANGE, OF_THE_NUMBERS, PLACES, SPIKE_FROM, Fault

__all__ = ["install_faults"]

GRADIENT_PASS, SAVING, BETWEEN = "forward and backward", "saving", "between two steps"  # phases, as workers call them
ORDER = {name: number for number, name in enumerate(PLACES)}
END_OF_STEP = ORDER["commit"]
WRITER, READER = "paceline.checkpoint.async_writer", "paceline.worker.data.data_loading"
ASKED_S = 30.0  # for what is asked of another process


def install_faults(path: Path, *, worker_rank: int, recorder: FlightRecorder, num_alike: int = 1) -> None:
    """From now on the faults of the programme in `path` that are this worker's come.

    `num_alike` neighbours in number cut layers together, and all have a micro-batch's output. The first of them says
    what its loss is, so wrong numbers of any of them are made there.
    """
    notes = DrillFolder(path)
    faults = {
        number: fault
        for number, fault in enumerate(notes.programme)
        if worker_rank == fault.worker - (fault.worker % num_alike if fault.poisons else 0)
    }
    exchanges = [number for number, fault in enumerate(notes.programme) if fault.kind == EXCHANGE]
    if exchanges:  # of all workers
        _exchange_samples()
        notes.came(exchanges[0], step=1, place="forward")
        return
    if not faults:
        return
    doom = _FaultTriggers(faults, notes)
    for name, listener in (
        ("begin", doom.begins),
        ("enter", doom.enters),
        ("wait", doom.waits),
        ("join", doom.joins),
    ):
        setattr(recorder, name, _after(getattr(recorder, name), listener))
    if any(fault.place == "save" for fault in faults.values()):
        doom.listen_to_the_writer()


class _FaultTriggers:
    """One worker's faults, and where the worker stands."""

    def __init__(self, faults: dict[int, Fault], notes: DrillFolder) -> None:
        self._faults, self._notes = faults, notes
        self._phase, self._step, self._since = "", 0, 0.0
        self._calls: dict[int, str] = {}  # what is under way in this step, by the ring's serial
        self._slow: Fault | None = None
        self._has_slowed = False  # in this step
        self._num_steps, self._step_counted = 0, 0  # of its own: where replicas take turns, each has but some of all
        self._hook: Any = None
        self._refuses = False  # the disk is said to be full
        self._numbers = {number: fault for number, fault in faults.items() if fault.kind in OF_THE_NUMBERS}
        self._model: nn.Module | None = None  # that was called last in a step
        self._calls_of_models: ModelCalls | None = None

    # What the worker says of itself.

    def begins(self, _: None, phase: str, step: int) -> None:
        if phase == GRADIENT_PASS and step != self._step_counted:
            self._num_steps, self._step_counted = self._num_steps + 1, step
        came_from, self._phase, self._step = self._phase, phase, step
        self._calls.clear()
        if self._numbers:
            self._begins_with_numbers(came_from)
        if phase == GRADIENT_PASS:
            self._since = time.perf_counter()
            self._slow, self._has_slowed = self._slow_now(), False
            if self._is_due("forward"):
                self._hook = torch.nn.modules.module.register_module_forward_pre_hook(self._in_forward)
        elif came_from == GRADIENT_PASS:  # whatever was to come in this step, and found no place
            if not self._has_slowed:
                self._slow_down()
            self._come_to("commit")
        elif phase == SAVING:
            self._come_to("save", but=self._is_the_writers)

    def _begins_with_numbers(self, came_from: str) -> None:
        """Listen to the models in a step; between two steps a bit may flip, before weights are compared."""
        if self._phase == GRADIENT_PASS and self._calls_of_models is None:
            self._calls_of_models = ModelCalls(self._model_called)
        elif came_from == GRADIENT_PASS and self._calls_of_models is not None:
            self._calls_of_models.close()
            self._calls_of_models = None
        if self._phase == BETWEEN and self._model is not None:
            for number, fault in self._numbers.items():
                is_due = fault.kind == "flip" and self._step >= fault.step
                if is_due and self._notes.came(number, step=self._step, place="between steps"):
                    flip_a_bit(self._model, seed=str(fault))

    def _model_called(self, model: nn.Module, output: Any) -> Any:
        self._model = model
        for number, fault in self._numbers.items():
            is_known = fault.kind != "spike" or self._num_steps >= SPIKE_FROM  # what this worker's losses leap from
            is_due = fault.poisons and self._step >= fault.step and is_known
            if is_due and self._notes.came(number, step=self._step, place="forward"):
                return poisoned(output, fault.kind)
        return None

    def enters(self, serial: int, kind: str, what: str, **_: Any) -> None:
        if self._phase == GRADIENT_PASS:
            self._calls[serial] = what
            if what != "the vote":
                self._slow_down()

    def _slow_down(self) -> None:
        """Take as long as a slow worker would have since it was here last."""
        if self._slow is not None:
            time.sleep((self._slow.times - 1) * (time.perf_counter() - self._since))
            self._since, self._has_slowed = time.perf_counter(), True

    def waits(self, _: None, serial: int) -> None:
        if serial in self._calls:
            self._come_to("commit" if self._calls[serial] == "the vote" else "sum")

    def joins(self, _: None, name: str, *__: Any, is_main: bool = False) -> None:
        if is_main and name != "generation 0" and self._step:
            self._come_to("regroup")

    def listen_to_the_writer(self) -> None:
        """The functions that write a checkpoint are wrapped: only the worker that writes comes by."""
        module: Any = importlib.import_module(WRITER)
        write, write_marker = module.AsyncWriter._write, module.write_commit_marker

        @functools.wraps(write)
        def watched_write(writer: Any, save: Any) -> None:
            self._during_save(save.step, functools.partial(write, writer, save))

        @functools.wraps(write_marker)
        def watched_mark(path: Path, mark: Any) -> None:
            self._come_to("save", step=mark.step, but=lambda fault: fault.kind == "full_disk")
            if self._refuses:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            write_marker(path, mark)

        module.AsyncWriter._write, module.write_commit_marker = watched_write, watched_mark

    # Where faults come.

    def _during_save(self, step: int, write: Callable[[], None]) -> None:
        """A whole save, in the thread that writes; the disk may be full for as long as it takes."""
        full = [
            number for number, fault in self._faults.items() if fault.kind == "full_disk" and self._has(fault, step)
        ]
        if not full or not self._notes.came(full[0], step=step, place="save"):
            write()
            return
        self._refuses = not self._notes.asks_for("full_disk")
        if not self._refuses:
            self._notes.ask(full[0], "fill", limit_s=ASKED_S)
        write()
        if not self._refuses:
            self._notes.ask(full[0], "empty", limit_s=ASKED_S)
        self._refuses = False

    def _in_forward(self, *_: Any) -> None:
        if self._phase == GRADIENT_PASS:
            self._come_to("forward")

    def _come_to(self, place: str, *, step: int | None = None, but: Callable[[Fault], bool] = lambda _: False) -> None:
        """The worker is here now: what was to come here, or before in the step, comes."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        step = self._step if step is None else step
        for number, fault in self._faults.items():
            due = fault.place == place or (ORDER[fault.place] < ORDER[place] <= END_OF_STEP)
            if due and self._has(fault, step) and not but(fault) and self._notes.came(number, step=step, place=place):
                self._do(number, fault)

    def _is_due(self, place: str) -> bool:
        return any(fault.place == place and self._has(fault, self._step) for fault in self._faults.values())

    def _has(self, fault: Fault, step: int) -> bool:
        """Whether a fault's hour has come, of those that come at a place."""
        return step >= fault.step and fault.kind not in ("slow", *OF_THE_NUMBERS)

    @staticmethod
    def _is_the_writers(fault: Fault) -> bool:
        return fault.worker == 0

    def _slow_now(self) -> Fault | None:
        for number, fault in self._faults.items():
            if fault.kind == "slow" and fault.step <= self._step < fault.step + fault.steps:
                self._notes.came(number, step=self._step, place="forward")
                return fault
        return None

    def _do(self, number: int, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill_server":
                kill_servers()
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "stop":
                stop(fault.seconds)
            case "cut" if self._notes.asks_for("cut"):
                self._notes.ask(number, "cut", limit_s=ASKED_S)
            case "cut":
                cut_sockets()
            case "torn_checkpoint":
                self._notes.ask(number, "tear", limit_s=ASKED_S)
            case _:
                raise ValueError(f"{fault} does not come at a place")


def _exchange_samples() -> None:
    """From now on every micro-batch has other samples, under the same random state; the ledger stays as it is."""
    module: Any = importlib.import_module(READER)
    fetch, epoch_of = module.fetch_samples, module.StreamReader._epoch

    def fetch_others(dataset: Any, indices: list[int]) -> list[Any]:
        num_samples = len(dataset)
        return fetch(dataset, [(index + max(1, num_samples // 2)) % num_samples for index in indices])

    def begin_later(reader: Any, epoch: int, position: int) -> Any:
        return epoch_of(reader, epoch, position + reader._size)

    module.fetch_samples, module.StreamReader._epoch = fetch_others, begin_later


def stop(seconds: float | None) -> None:
    """Stop this process, all its threads; another one has it go on after `seconds`."""
    if seconds is not None:
        subprocess.Popen(["sh", "-c", f"sleep {seconds} && kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_servers() -> None:
    """Kill the parameter servers that this process has started."""
    from paceline.sync.parameter_server.server_process import NAME  # only here: other plans need nothing of it

    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has gone meanwhile
            name, _, rest = (place / "stat").read_text().partition("(")[2].rpartition(")")
            if name == NAME and int(rest.split()[1]) == os.getpid():  # its parent
                os.kill(int(place.name), signal.SIGKILL)


def cut_sockets() -> None:
    """Shut every connection of this process down; memory that it shares with others stays."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                end.shutdown(socket.SHUT_RDWR)
        except OSError:  # it listens only, or was closed meanwhile
            continue


def _after(function: Callable[..., Any], listener: Callable[..., None]) -> Callable[..., Any]:
    """`function`, and then `listener(its result, its arguments)`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        listener(result, *args, **kwargs)
        return result

    return call
