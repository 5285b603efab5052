"""In a Jupyter kernel a function of a cell trains on workers; errors and interrupts behave as in any cell."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient

from programs import Announcements, child_environment, losses, record, reference_losses, the_run
from supervised_launch import MARK, marked

DEFINE = """\
import json, os, torch, paceline
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

def train(worker, *, epochs=2, tell=None):
    torch.manual_seed(1)
    x = torch.randn(48, 6)
    data = TensorDataset(x, x[:, :3].argmax(dim=1))
    model = worker.prepare(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 3)))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = worker.stepper(model, optim, F.cross_entropy)
    for batch in worker.batches(data, epochs=epochs):
        worker.report(loss=step(batch))
        if tell and worker.step == 6:
            with open(tell, "a") as pipe:
                pipe.write(json.dumps(os.getpid()) + "\\n")
    return {"step": worker.step, "workers": worker.workers}
"""
RUN = 'paceline.run(train, workers=2, plan="batch(size=12,micro=3)")'
FAIL = """\
def fails(worker):
    if worker.rank == 1:
        raise ValueError("a mistake in the cell")
    worker.wait()

paceline.run(fails, workers=2, run_dir="failed")
"""
ENDLESS = 'paceline.run(lambda worker: train(worker, epochs=100000, tell="{}"), workers=2, run_dir="interrupted")'


class Notebook:
    """A notebook with a live kernel; `cell` adds a cell and runs it."""

    def __init__(self, client: NotebookClient, mark: str) -> None:
        self.client, self._mark = client, mark
        self.outputs: list[Any] = []  # of the last cell

    @property
    def displays(self) -> list[Any]:
        """The displays below the last cell."""
        return [output for output in self.outputs if output.output_type == "display_data"]

    async def cell(self, source: str) -> tuple[str, str, str]:
        """Run a cell: what it showed as text, its value as text, its error (name, message and traceback) as text."""
        cells = self.client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source))
        done = await self.client.async_execute_cell(cells[-1], len(cells) - 1)
        self.outputs = done.outputs
        printed = "".join(output["text"] for output in done.outputs if output.output_type == "stream")
        printed += "\n".join(output["data"]["text/plain"] for output in self.displays)
        values = [output["data"]["text/plain"] for output in done.outputs if output.output_type == "execute_result"]
        errors = [output for output in done.outputs if output.output_type == "error"]
        error = "\n".join(f"{one['ename']}: {one['evalue']}\n" + "\n".join(one["traceback"]) for one in errors)
        return printed, "".join(values), error

    async def interrupt(self) -> None:
        """Interrupt the kernel, as the button does."""
        kernel: Any = self.client.km
        await kernel.interrupt_kernel()

    def others(self) -> list[str]:
        """The processes of this notebook that are not the kernel itself."""
        return [line for line in marked(self._mark) if not is_kernel(int(line.partition(":")[0]))]


def is_kernel(pid: int) -> bool:
    return "ipykernel_launcher" in " ".join(psutil.Process(pid).cmdline())


def in_a_notebook(scenario: Callable[[Notebook], Awaitable[None]], folder: Path) -> None:
    """Run `scenario` with a kernel of its own; the kernel ends with it."""

    async def whole() -> None:
        mark = uuid.uuid4().hex
        client = NotebookClient(
            nbformat.v4.new_notebook(),
            kernel_name="python3",
            timeout=60,
            allow_errors=True,
            shutdown_kernel="immediate",
        )
        async with client.async_setup_kernel(cwd=str(folder), env=child_environment() | {MARK: mark}):
            await scenario(Notebook(client, mark))

    asyncio.run(whole())


def test_a_function_of_a_cell_trains_on_workers_again_and_again(tmp_path: Path) -> None:
    async def scenario(notebook: Notebook) -> None:
        await notebook.cell(DEFINE)
        printed, value, error = await notebook.cell(RUN)
        assert (value, error) == ("{'step': 8, 'workers': 2}", ""), printed
        assert "2 workers on cpu" in printed and "step 8" in printed and "finished at step 8" in printed
        assert [output.output_type for output in notebook.outputs] == ["display_data", "execute_result"]
        (display,) = notebook.displays
        shown = display["data"]["text/html"]
        assert ">finished</b>" in shown and "step <b>8</b> of 8" in shown and "<polyline" in shown
        assert losses(the_run(tmp_path)) == pytest.approx(list(reference_losses()), rel=1e-5)
        assert notebook.others() == []

        printed, _, error = await notebook.cell(FAIL)
        assert "WorkerError" in error and "ValueError: a mistake in the cell" in error
        assert "in fails" in error  # the worker's own traceback
        assert ">failed</b>" in notebook.displays[0]["data"]["text/html"] and len(notebook.displays) == 1
        assert record(tmp_path / "failed")["state"] == "failed"
        assert notebook.others() == []

        _, value, error = await notebook.cell("paceline.run(lambda worker: worker.gather(worker.rank), workers=3)")
        assert (value, error) == ("[0, 1, 2]", "")

    in_a_notebook(scenario, tmp_path)


@pytest.mark.further
def test_interrupting_the_kernel_stops_the_run_and_leaves_only_the_kernel(tmp_path: Path) -> None:
    async def scenario(notebook: Notebook) -> None:
        await notebook.cell(DEFINE)
        running = asyncio.create_task(notebook.cell(ENDLESS.format(pipe.path)))
        assert len(await asyncio.to_thread(pipe.take, 2, limit_s=60)) == 2
        await notebook.interrupt()
        _, _, error = await running
        assert error.startswith("KeyboardInterrupt")
        assert notebook.others() == []
        assert record(tmp_path / "interrupted")["state"] == "stopped"
        _, value, error = await notebook.cell("paceline.run(lambda worker: worker.workers, workers=2)")
        assert (value, error) == ("2", "")

    with contextlib.closing(Announcements(tmp_path / "pipe")) as pipe:
        in_a_notebook(scenario, tmp_path)
