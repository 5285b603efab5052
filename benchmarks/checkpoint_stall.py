"""How long training stands still for a checkpoint, and how much it slows down beside: Paceline and async_save.

A model of 33 M parameters with AdamW (a state of 400 MB) takes steps; every few its state is saved. Each contender
runs in a process of its own, in turns; medians are over all rounds. Printed per save:

    first        seconds that the first save call of a process takes
    stall        seconds that a later save call takes
    lost         stall, and what the steps until the checkpoint is complete took longer than steps without one

"paceline_uploaded" also sends each checkpoint to a store, a folder unless REMOTE_DIR names another one
(s3://bucket/path); its saves are over when they are there.

    python benchmarks/checkpoint_stall.py [--rounds 3] [--saves 4] [--megabytes 400] [--threads 1] [--directory DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from driving.options import options_of
from driving.progress import doing

WIDTH = 1024  # of the model's square layers
BASELINE_STEPS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A way to save: `save` starts one, `is_written` says whether it is complete, `finish` waits for it."""

    save: Callable[[int], None]
    is_written: Callable[[], bool]
    finish: Callable[[], None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--saves", type=int, default=4, help="later saves in each process")
    parser.add_argument("--megabytes", type=float, default=400)
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the training process")
    parser.add_argument("--directory", type=Path, default=None, help="where checkpoints are written")
    parser.add_argument("--contender", default=None, help=argparse.SUPPRESS)
    arguments = options_of(parser, takes="about 5 minutes", quick={"rounds": 1, "saves": 1, "megabytes": 50.0})
    if arguments.contender:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            print(json.dumps(measure(arguments, Path(directory))))
        return 0
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for number in range(arguments.rounds):
        for name in CONTENDERS:
            doing(f"round {number + 1} of {arguments.rounds}: {name}")
            command = [sys.executable, __file__, *sys.argv[1:], "--contender", name]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode != 0:
                raise SystemExit(f"{name} failed:\n{done.stderr}")
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
            os.sync()  # nobody pays for the disk work of the one before
    print_table(arguments, results)
    return 0


def measure(arguments: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Train and save in this process; returns seconds."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    num_layers = max(1, round(arguments.megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    batch = torch.randn(32, WIDTH)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        return time.perf_counter() - began

    step()  # makes the optimizer's state
    contender = CONTENDERS[arguments.contender](model, optimizer, directory)
    for _ in range(3):
        step()
    stalls, lost, written, baseline_s = [], [], [], 0.0
    for number in range(1 + arguments.saves):
        baseline_s = statistics.median(step() for _ in range(BASELINE_STEPS))
        began = time.perf_counter()
        contender.save(number)
        stalls.append(time.perf_counter() - began)
        steps = 0
        while not contender.is_written():
            step()
            steps += 1
        elapsed = time.perf_counter() - began
        lost.append(elapsed - steps * baseline_s)
        written.append(elapsed)
    contender.finish()
    return {"step": baseline_s, "stalls": stalls, "lost": lost, "written": written}


def tensors_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Flat, as Paceline names them; the same tensors for all contenders."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for (name, _), state in zip(model.named_parameters(), optimizer.state.values(), strict=True):
        tensors.update({f"optimizer.state.{name}.{key}": value for key, value in state.items()})
    return tensors


def paceline_writer(model: Any, optimizer: Any, directory: Path, *, warm: bool = True) -> Contender:
    from paceline.checkpoint.async_writer import AsyncWriter
    from paceline.events import CheckpointSaved, Event

    saved: list[Event] = []
    writer = AsyncWriter(directory, keep=1, on_event=saved.append)
    if warm:
        writer.warm(tensors_of(model, optimizer))
    last = 0

    def save(number: int) -> None:
        nonlocal last
        last = number
        writer.save(number, tensors_of(model, optimizer), {"step": number}, {})

    def is_written() -> bool:
        return len(saved) > last

    def finish() -> None:
        writer.close()
        if not all(isinstance(event, CheckpointSaved) for event in saved):
            raise SystemExit(f"not all was saved: {saved}")

    return Contender(save=save, is_written=is_written, finish=finish)


def paceline_uploaded(model: Any, optimizer: Any, directory: Path) -> Contender:
    """A save is over when it is in the store, so that steps beside the upload count as lost where they are slower."""
    from paceline.events import Event, UploadDone
    from paceline.plan import Job
    from paceline.runs.run_uploads import RunUploads

    address = os.environ.get("REMOTE_DIR", f"file://{directory}/far/run")
    uploads = RunUploads(Job(run_dir=str(directory), remote_dir=address, keep=1, fresh=True))
    uploads.begin(print)
    writer = paceline_writer(model, optimizer, directory / "checkpoints")
    there: set[int] = set()
    last = 0

    def note(event: Event) -> None:
        if isinstance(event, UploadDone):
            there.add(event.step)

    def save(number: int) -> None:
        nonlocal last
        last = number
        writer.save(number)

    def is_written() -> bool:
        uploads.poll(note)
        return writer.is_written() and last in there

    def finish() -> None:
        writer.finish()
        with uploads:
            uploads.end("finished", note)

    return Contender(save=save, is_written=is_written, finish=finish)


def paceline_cold(model: Any, optimizer: Any, directory: Path) -> Contender:
    return paceline_writer(model, optimizer, directory, warm=False)


def torch_default(model: Any, optimizer: Any, directory: Path) -> Contender:
    return _torch(model, optimizer, directory, {})


def torch_cached(model: Any, optimizer: Any, directory: Path) -> Contender:
    """The fastest that torch has on a CPU: a stager of the caller's, which keeps its memory."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    return _torch(
        model, optimizer, directory, {"async_stager": DefaultStager(StagingOptions(False, False, False, False))}
    )


def torch_process(model: Any, optimizer: Any, directory: Path) -> Contender:
    """Written by another process, from shared memory."""
    import torch.distributed
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    stager = DefaultStager(StagingOptions(False, True, False, False))
    return _torch(
        model,
        optimizer,
        directory,
        {"async_stager": stager, "async_checkpointer_type": AsyncCheckpointerType.PROCESS},
    )


def _torch(model: Any, optimizer: Any, directory: Path, options: dict[str, Any]) -> Contender:
    import torch.distributed.checkpoint as dcp

    future: Any = None

    def save(number: int) -> None:
        nonlocal future
        shutil.rmtree(directory / str(number - 1), ignore_errors=True)
        future = dcp.async_save(
            {**tensors_of(model, optimizer), "step": number}, checkpoint_id=str(directory / str(number)), **options
        )

    def finish() -> None:
        future.result()
        if not directory.exists():
            raise SystemExit("nothing was saved")

    return Contender(save=save, is_written=lambda: future.done(), finish=finish)


CONTENDERS: dict[str, Callable[[Any, Any, Path], Contender]] = {
    "paceline": paceline_writer,
    "paceline_uploaded": paceline_uploaded,
    "paceline, not warmed": paceline_cold,
    "async_save": torch_default,
    "async_save, own stager": torch_cached,
    "async_save, process": torch_process,
}


def print_table(arguments: argparse.Namespace, results: dict[str, list[dict[str, Any]]]) -> None:
    def middle(name: str, what: Callable[[dict[str, Any]], list[float]]) -> float:
        return statistics.median(value for one in results[name] for value in what(one))

    columns = {
        "first": lambda one: one["stalls"][:1],
        "stall": lambda one: one["stalls"][1:],
        "lost": lambda one: one["lost"][1:],
        "written": lambda one: one["written"][1:],
        "step": lambda one: [one["step"]],
    }
    print(
        f"state of {arguments.megabytes:g} MB, {arguments.threads} threads, {os.cpu_count()} cores; median ms of "
        f"{arguments.rounds} x {arguments.saves} saves; in brackets: of async_save"
    )
    print(f"{'':26}" + "".join(f"{column:>18}" for column in columns))
    for name in results:
        cells = []
        for what in columns.values():
            value, peer = middle(name, what), middle("async_save", what)
            cells.append(f"{value * 1e3:9.1f} ({value / peer:4.2f}x)")
        print(f"{name:26}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
