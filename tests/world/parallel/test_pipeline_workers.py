"""Pipelines of forked workers over gloo: under every schedule the losses and gradients are those of one process."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import quick
import stage_models
from paceline.errors import PlanError, SyncError
from paceline.parallel.model_units import find_units, seeded_units
from paceline.parallel.pipeline.stage_partition import keep_stages, partition_units
from paceline.parallel.pipeline.stage_transfer import TorchTransport
from paceline.parallel.pipeline.stage_worker import StageWorker, bubble_share
from paceline.parallel.pipeline.tape import Tape
from paceline.parallel.pipeline.tape_recorder import record
from paceline.schedule.pipeline import build, in_flight_bound
from stage_models import Case

CPU = torch.device("cpu")
LIMIT_S = 90.0
SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    """The first operation on the meta device imports much of torch: here, once, not in every worker."""
    case = stage_models.make("tied")
    record(case.model, case.forward, case.micros[0], units=find_units(case.model), device=CPU)


def forked(scratch: Path, num_workers: int, function: Callable[[int, Any], Any]) -> list[Any]:
    """Return what `function(worker_index, group)` returned in each of the forked workers."""
    pids = [_fork(scratch, index, num_workers, function) for index in range(num_workers)]
    deadline = time.monotonic() + LIMIT_S
    statuses: dict[int, int] = {}
    try:
        while len(statuses) < num_workers and time.monotonic() < deadline:
            for index, pid in enumerate(pids):
                if index not in statuses:
                    done, status = os.waitpid(pid, os.WNOHANG)
                    statuses.update({index: status} if done else {})
            time.sleep(0.005)
    finally:
        for index, pid in enumerate(pids):
            if index not in statuses:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    for index in range(num_workers):
        error = scratch / f"error_{index}"
        assert statuses.get(index) == 0, error.read_text() if error.exists() else f"worker {index} did not end"
    return [torch.load(scratch / f"value_{index}", weights_only=False) for index in range(num_workers)]


def _fork(scratch: Path, index: int, num_workers: int, function: Callable[[int, Any], Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(scratch / "store"), num_workers)
        dist.init_process_group(
            "gloo", store=store, rank=index, world_size=num_workers, timeout=timedelta(seconds=LIMIT_S)
        )
        torch.save(function(index, dist.group.WORLD), scratch / f"value_{index}")
        status = 0
    except BaseException:  # the child's boundary: the parent shows it
        (scratch / f"error_{index}").write_text(traceback.format_exc())
    finally:
        os._exit(status)


@dataclasses.dataclass(kw_only=True)
class Setting:
    """Which case runs how."""

    name: str
    schedule: str
    num_workers: int
    stages_per_worker: int
    num_micro: int

    def case(self) -> Case:
        return stage_models.make(self.name, num_micro=self.num_micro)

    @property
    def weights(self) -> list[float]:
        return [0.5 / (1 + index) for index in range(self.num_micro)]

    @property
    def seeds(self) -> list[tuple[int, ...]]:
        return [(3, index) for index in range(self.num_micro)]

    def tapes(self) -> list[Tape]:
        """One for each micro-batch; those of the same kind share one."""
        case = self.case()
        first, last = (
            record(case.model, case.forward, micro, units=find_units(case.model), device=CPU)
            for micro in (case.micros[0], case.micros[-1])
        )
        return [first] * (self.num_micro - 1) + [last]

    def oracle(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Losses and gradients of one process."""
        case, losses = self.case(), []
        for micro, weight, seed in zip(case.micros, self.weights, self.seeds, strict=True):
            with seeded_units(find_units(case.model), *seed):
                loss = case.forward(micro)
            (loss * weight).backward()
            losses.append(loss.detach())
        return losses, {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}

    def worker(
        self, index: int, group: Any, tapes: list[Tape], *, limit_s: float = LIMIT_S
    ) -> tuple[StageWorker, Case]:
        """As a worker: the stages that are this one's, and nothing else of the model."""
        case = self.case()
        pipeline = build(
            self.schedule,
            num_workers=self.num_workers,
            num_micro=self.num_micro,
            stages_per_worker=self.stages_per_worker,
        )
        units = find_units(case.model)
        cut = partition_units(case.model, tapes[0], units=units, num_stages=pipeline.num_stages)
        keep_stages(case.model, cut, pipeline.stages_of(index))
        link = TorchTransport(group, worker_index=index, limit_s=limit_s)
        worker = StageWorker(
            case.model, units=units, partition=cut, pipeline=pipeline, worker_index=index, link=link, device=CPU
        )
        for micro, tape in zip(case.micros, tapes, strict=True):
            worker.learn(case.forward, micro, tape=tape)
        return worker, case

    def work(self, index: int, group: Any, tapes: list[Tape]) -> dict[str, Any]:
        """What each worker does: two steps, of which the second one is returned."""
        worker, case = self.worker(index, group, tapes)
        worker.step(case.forward, case.micros, weights=self.weights, seeds=self.seeds)
        for parameter in case.model.parameters():
            parameter.grad = None
        outcome = worker.step(case.forward, case.micros, weights=self.weights, seeds=self.seeds)
        return {
            "losses": outcome.results,
            "gradients": {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None},
            "peak": outcome.peak_in_flight,
            "bound": in_flight_bound(worker.pipeline, index),
            "walk": (outcome.busy_s, outcome.whole_s),
        }


def compare(setting: Setting, scratch: Path) -> None:
    losses, gradients = setting.oracle()
    tapes = setting.tapes()  # recorded once: every worker would record the same
    values = forked(scratch, setting.num_workers, lambda index, group: setting.work(index, group, tapes))
    assert all(not value["losses"] for value in values[:-1])
    for index, loss in enumerate(losses):
        torch.testing.assert_close(values[-1]["losses"][index], loss, rtol=1e-9, atol=0)
    found: dict[str, Tensor] = {}
    for value in values:
        for name, gradient in value["gradients"].items():
            found[name] = found[name] + gradient if name in found else gradient
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=1e-6, atol=1e-9 * scale, msg=name)
    for value in values:
        assert value["peak"] == value["bound"]
    assert 0 <= bubble_share([value["walk"] for value in values]) < 1


@pytest.mark.parametrize(
    ("name", "schedule", "stages_per_worker"),
    [
        *[("tied", *schedule) for schedule in SCHEDULES],
        *[("t5", *schedule) for schedule in SCHEDULES[2:]],
        *[quick.further("t5", *schedule) for schedule in SCHEDULES[:2]],
        *[quick.further("skip", *schedule) for schedule in SCHEDULES],
    ],
)
def test_two_workers_have_the_losses_and_gradients_of_one_process(
    name: str, schedule: str, stages_per_worker: int, tmp_path: Path
) -> None:
    setting = Setting(name=name, schedule=schedule, num_workers=2, stages_per_worker=stages_per_worker, num_micro=5)
    compare(setting, tmp_path)


@pytest.mark.parametrize("schedule, stages_per_worker", SCHEDULES)
def test_four_workers_have_the_losses_and_gradients_of_one_process(
    schedule: str, stages_per_worker: int, tmp_path: Path
) -> None:
    name = "resnet" if stages_per_worker > 1 else "gpt2"
    setting = Setting(name=name, schedule=schedule, num_workers=4, stages_per_worker=stages_per_worker, num_micro=6)
    compare(setting, tmp_path)


@pytest.mark.parametrize("schedule, stages_per_worker", SCHEDULES)
def test_fewer_micro_batches_than_stages_are_no_trouble(schedule: str, stages_per_worker: int, tmp_path: Path) -> None:
    setting = Setting(name="tied", schedule=schedule, num_workers=3, stages_per_worker=stages_per_worker, num_micro=2)
    compare(setting, tmp_path)


def test_evaluation_runs_the_forwards_alone_and_gives_their_results_on_the_last_stage(tmp_path: Path) -> None:
    setting = Setting(name="tied", schedule="1f1b", num_workers=2, stages_per_worker=1, num_micro=3)

    tapes = setting.tapes()

    def work(index: int, group: Any) -> dict[str, Any]:
        worker, case = setting.worker(index, group, tapes)
        case.model.eval()
        outcome = worker.evaluate(lambda tokens: {"logits": case.model(tokens).logits}, case.micros)
        return {"results": outcome.results, "grads": [p.grad for p in case.model.parameters() if p.grad is not None]}

    first, last = forked(tmp_path, 2, work)
    case = setting.case()
    case.model.eval()
    assert first["results"] == {} and not first["grads"] and not last["grads"]
    for index, micro in enumerate(case.micros):
        torch.testing.assert_close(last["results"][index]["logits"], case.model(micro).logits.detach())


def test_a_worker_that_never_sends_is_named_with_the_value_and_the_micro_batch(tmp_path: Path) -> None:
    setting = Setting(name="tied", schedule="1f1b", num_workers=2, stages_per_worker=1, num_micro=2)
    said = tmp_path / "said"

    tapes = setting.tapes()

    def work(index: int, group: Any) -> str:
        worker, case = setting.worker(index, group, tapes, limit_s=1.0)
        if index == 0:
            while not said.exists():  # the silent one stays there, so that only the limit can end the wait
                os.sched_yield()
            return ""
        with pytest.raises(SyncError) as error:
            worker.step(case.forward, case.micros, weights=setting.weights, seeds=setting.seeds)
        said.touch()
        return str(error.value)

    message = forked(tmp_path, 2, work)[1]
    expected = "stage 0 to 1: waiting for an output of blocks.1 (float64 [4, 9, 16]) of micro-batch 0 failed"
    assert message.startswith(f"{expected} (limit 1 s)")


def test_micro_batches_weights_and_schedule_must_be_as_many(tmp_path: Path) -> None:
    setting = Setting(name="tied", schedule="1f1b", num_workers=1, stages_per_worker=1, num_micro=2)

    tapes = setting.tapes()

    def work(index: int, group: Any) -> list[str]:
        worker, case = setting.worker(index, group, tapes)
        said = []
        for micros, weights, forward in (
            (case.micros[:1], [1.0], case.forward),
            (case.micros, [1.0], case.forward),
            (case.micros, [1.0, 1.0], lambda tokens: case.model(tokens).logits),
        ):
            with pytest.raises((ValueError, PlanError)) as error:
                worker.step(forward, micros, weights=weights)
            said.append(str(error.value))
        return said

    said = forked(tmp_path, 1, work)[0]
    assert said[0].startswith("1 micro-batches, 1 weights and 0 seeds were passed to a schedule for 2.")
    assert said[1].startswith("2 micro-batches, 1 weights")
    assert "must return the loss: one number" in said[2] and "float64 [4, 9, 31]" in said[2]
