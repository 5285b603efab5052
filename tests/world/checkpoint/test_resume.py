"""Stop anywhere, continue anywhere: the same training as without the stop."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import quick
from forked import WorkersFailed, World
from paceline.errors import CheckpointError
from paceline.plan import Batch, Compute, Plan

PLAN = Plan(batch=Batch(size=16, micro=4), compute=Compute(precision="fp64"))


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 6, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(1))


class Average:
    """Something else with a state: a running average of losses."""

    def __init__(self) -> None:
        self.value = 0.0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def net(width: int = 12) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Tanh(), nn.Linear(width, 4))


def train(worker: Any, *, optimizer: str = "AdamW", save_at: int | None = None) -> dict[str, Any]:
    model = worker.prepare(net())
    optim = worker.prepare(getattr(torch.optim, optimizer)(model.parameters(), lr=0.01))
    schedule = worker.prepare(torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=0.05, total_steps=12))
    average = worker.prepare(Average())
    step = worker.stepper(model, optim, F.cross_entropy)
    found: dict[int, Any] = {}
    for batch in worker.batches(dataset(), epochs=3):
        loss = float(step(batch))
        average.value = 0.9 * average.value + 0.1 * loss
        schedule.step()
        found[worker.step] = (loss, optim.param_groups[0]["lr"], average.value, float(torch.rand(())))
        if worker.step == save_at:
            worker.save()
    return {"steps": found, "state": {key: value.clone() for key, value in model.state_dict().items()}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of one process brings that is not stopped."""
    return World(tmp_path_factory.mktemp("whole")).one_process(train, PLAN)


@pytest.mark.parametrize(
    ("first", "second", "stop"),
    [
        (1, 1, 2),
        (1, 3, 4),
        (3, 1, 7),
        (2, 3, 2),
        (2, 3, 7),
        quick.further(1, 1, 4),
        quick.further(1, 1, 7),
        quick.further(1, 3, 2),
        quick.further(1, 3, 7),
        quick.further(3, 1, 2),
        quick.further(3, 1, 4),
        quick.further(2, 3, 4),
    ],
)
def test_a_stopped_run_continues_as_if_nothing_had_happened(
    world: World, whole: dict[str, Any], first: int, second: int, stop: int
) -> None:
    before = world(train, first, PLAN, max_steps=stop)[0]["steps"]
    after = world(train, second, PLAN)
    assert sorted(before) + sorted(after[0]["steps"]) == sorted(whole["steps"])
    for step, values in {**before, **after[0]["steps"]}.items():
        assert values == pytest.approx(whole["steps"][step], rel=1e-6)
    for result in after:
        for key, value in whole["state"].items():
            torch.testing.assert_close(result["state"][key], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "optimizer", ["SGD", "Adam", quick.further("RMSprop"), "Adagrad", quick.further("NAdam"), "Adafactor"]
)
def test_every_optimizers_state_comes_back(world: World, optimizer: str) -> None:
    def run(worker: Any) -> list[float]:
        model = worker.prepare(net())
        optim = worker.prepare(getattr(torch.optim, optimizer)(model.parameters(), lr=0.01))
        step = worker.stepper(model, optim, F.cross_entropy)
        return [float(step(batch)) for batch in worker.batches(dataset(), epochs=3)]

    before, after = world(run, 2, PLAN, max_steps=5)[0], world(run, 1, PLAN)[0]
    assert before + after == pytest.approx(world.one_process(run, PLAN), rel=1e-6)


def test_a_save_in_the_loop_counts_the_step_that_was_just_made(world: World, whole: dict[str, Any]) -> None:
    def first(worker: Any) -> None:
        train(worker, save_at=3)
        raise RuntimeError("gone")

    with pytest.raises(WorkersFailed, match="gone"):
        world(first, 2, PLAN, max_steps=6, save_at_end=False)
    after = world(train, 2, PLAN)[0]["steps"]
    assert sorted(after) == list(range(4, 13))

    assert all(after[step] == pytest.approx(whole["steps"][step], rel=1e-6) for step in after)


def test_periodic_saves_happen_between_steps(world: World, whole: dict[str, Any]) -> None:
    def exits(worker: Any) -> None:
        train(worker)
        raise RuntimeError("gone")

    with pytest.raises(WorkersFailed, match="gone"):
        world(exits, 2, PLAN, max_steps=8, save_every=3, save_at_end=False)
    after = world(train, 1, PLAN)[0]["steps"]
    assert sorted(after) == list(range(7, 13))
    assert all(after[step] == pytest.approx(whole["steps"][step], rel=1e-6) for step in after)


def test_fresh_starts_over(world: World) -> None:
    world(train, 1, PLAN, max_steps=3)
    assert sorted(world(train, 1, PLAN, max_steps=3, fresh=True)[0]["steps"]) == [1, 2, 3]


def test_restore_takes_a_named_checkpoint(world: World, whole: dict[str, Any]) -> None:
    world(lambda worker: train(worker, save_at=3), 1, PLAN, max_steps=6)
    chosen = world.run_dir / "checkpoints" / "step_00000003"

    def again(worker: Any) -> dict[str, Any]:
        assert worker.restore(str(chosen)) == 3
        return train(worker)

    after = world(again, 2, PLAN, fresh=True)[0]["steps"]
    assert all(after[step] == pytest.approx(whole["steps"][step], rel=1e-6) for step in range(4, 13))


def test_a_named_checkpoint_that_is_damaged_is_refused_on_all_workers(world: World) -> None:
    world(lambda worker: train(worker, save_at=3), 1, PLAN, max_steps=6)
    older, damaged = (world.run_dir / "checkpoints" / f"step_0000000{step}" for step in (3, 6))
    data = bytearray((damaged / "__0_0.distcp").read_bytes())
    data[len(data) // 2] ^= 1
    (damaged / "__0_0.distcp").write_bytes(data)

    def again(worker: Any) -> int:
        with pytest.raises(CheckpointError, match=r"step_00000006 cannot be used: the file __0_0\.distcp is damaged"):
            worker.restore(str(damaged))
        return worker.restore(str(older))

    assert world(again, 2, PLAN, fresh=True) == [3, 3]


def test_a_changed_model_is_refused_with_the_parameters_name_and_shapes(world: World) -> None:
    world(train, 1, PLAN, max_steps=2)

    def wider(worker: Any) -> None:
        worker.prepare(net(width=14))

    with pytest.raises(WorkersFailed, match=r"model\.0\.weight.*\[12, 6\].*\[14, 6\]"):
        world(wider, 1, PLAN)
    world(train, 1, PLAN)  # nothing was lost


def test_what_nobody_prepared_is_said(world: World) -> None:
    world(train, 1, PLAN, max_steps=2)

    def less(worker: Any) -> None:
        model = worker.prepare(net())
        optim = worker.prepare(torch.optim.AdamW(model.parameters()))
        step = worker.stepper(model, optim, F.cross_entropy)
        for batch in worker.batches(dataset()):
            step(batch)

    world(less, 2, PLAN)
    log = (world.worker_dir(0) / "events.jsonl").read_text()
    assert "the checkpoint also holds object, scheduler, which this script did not prepare: not used" in log


def test_another_dataset_is_refused(world: World) -> None:
    world(train, 1, PLAN, max_steps=3)  # of 4 steps in an epoch

    def shorter(worker: Any) -> None:
        model = worker.prepare(net())
        worker.prepare(torch.optim.AdamW(model.parameters()))
        small = TensorDataset(torch.zeros(20, 6), torch.zeros(20, dtype=torch.int64))
        next(worker.batches(small))

    with pytest.raises(WorkersFailed, match=r"stands at sample 48 of epoch 1 .* 50 samples.*; now it has 20 samples"):
        world(shorter, 1, PLAN)


def test_optimizers_need_prepared_models(world: World) -> None:
    def wrong(worker: Any) -> None:
        worker.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))

    with pytest.raises(WorkersFailed, match="holds 2 parameters of no prepared model"):
        world(wrong, 1)


def test_checkpoints_are_torchs_own_format(world: World, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    world(train, 2, PLAN, max_steps=3)
    stored: dict[str, Tensor] = {"model.0.weight": torch.zeros(12, 6, dtype=torch.float64)}
    dcp.load(stored, checkpoint_id=str(world.run_dir / "checkpoints" / "step_00000003"), no_dist=True)
    assert float(stored["model.0.weight"].abs().sum()) > 0


def test_a_fresh_start_is_what_the_next_start_continues(world: World) -> None:
    """Checkpoints of the former try, at later steps, must not win over those of the fresh one."""
    world(train, 1, PLAN, max_steps=8)
    world(train, 1, PLAN, max_steps=3, fresh=True)
    assert sorted(world(train, 1, PLAN)[0]["steps"]) == list(range(4, 13))


def test_a_fresh_start_that_saves_nothing_deletes_nothing(world: World) -> None:
    world(train, 1, PLAN, max_steps=8)
    world(train, 1, PLAN, max_steps=3, fresh=True, save_at_end=False)
    assert sorted(world(train, 1, PLAN)[0]["steps"]) == list(range(9, 13))


@pytest.mark.parametrize(("times", "left"), [(1, ["1", "2", "3"]), (99, ["1", "2", "3", "8"])])
def test_a_checkpoint_of_the_former_try_that_cannot_be_deleted_is_a_warning(
    world: World, times: int, left: list[str]
) -> None:
    world(train, 1, PLAN, max_steps=8)

    def again(worker: Any) -> list[int]:
        rename, tried = Path.rename, list[Path]()

        def refuse(path: Path, target: Path) -> Path:
            if path.name == "step_00000008" and len(tried) < times:
                tried.append(path)
                raise OSError(errno.EBUSY, "Device or resource busy")
            return rename(path, target)

        pytest.MonkeyPatch().setattr(Path, "rename", refuse)  # in this process, to its end
        return sorted(train(worker)["steps"])

    assert world(again, 1, PLAN, max_steps=3, save_every=1, keep=9, fresh=True) == [[1, 2, 3]]
    warned = "that this run does not go on from could not be deleted: [Errno 16] Device or resource busy"
    assert (world.worker_dir(0) / "events.jsonl").read_text().count(warned) == min(times, 3)
    assert sorted(path.name[-1] for path in (world.run_dir / "checkpoints").iterdir()) == left


def test_a_run_whose_checkpoints_are_all_damaged_does_not_silently_start_over(world: World) -> None:
    world(train, 1, PLAN, max_steps=3)
    for data in (world.run_dir / "checkpoints").glob("*/*.distcp"):
        data.unlink()
    with pytest.raises(WorkersFailed, match=r"none of the 1 checkpoints in .* can be read .*--fresh"):
        world(train, 2, PLAN)
    assert sorted(world(train, 1, PLAN, max_steps=2, fresh=True)[0]["steps"]) == [1, 2]


def test_another_kind_of_optimizer_is_refused_by_name(world: World) -> None:
    def run(worker: Any, *, kind: Any) -> None:
        model = worker.prepare(net())
        step = worker.stepper(model, worker.prepare(kind(model.parameters(), lr=0.01)), F.cross_entropy)
        for batch in worker.batches(dataset()):
            step(batch)

    world(lambda worker: run(worker, kind=torch.optim.Adam), 1, PLAN, max_steps=2)
    with pytest.raises(WorkersFailed, match=r"optimizer is a SGD now, .* it has no dampening, momentum, nesterov"):
        world(lambda worker: run(worker, kind=torch.optim.SGD), 1, PLAN)
