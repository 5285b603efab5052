"""The work of `recovery.py` under Ray Train, with a checkpoint every few steps: FOLDER WIDTH RATE STEPS WORKERS
[ADDRESS], of a cluster; otherwise it makes one."""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]  # installed only where it is measured
import ray.train  # pyright: ignore[reportMissingImports]
import torch
import torch.nn.functional as F
from ray.train.torch import TorchTrainer, prepare_model  # pyright: ignore[reportMissingImports]

PROGRAMS = str(Path(__file__).parent)


def train(config: dict[str, Any]) -> None:
    sys.path.insert(0, PROGRAMS)
    from recover_work import SAVE_EVERY, Log, make_data, make_model, share

    torch.set_num_threads(1)
    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    model, data, done = prepare_model(make_model(config["width"])), make_data(), 0
    optim = torch.optim.SGD(model.parameters(), lr=config["rate"], momentum=0.9)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder) / "state.pt")
        model.load_state_dict(state["model"])
        optim.load_state_dict(state["optimizer"])
        done = state["step"]
    log = Log(Path(config["folder"]), rank)
    for number in range(done, config["steps"]):
        x, y = share(data, number, rank, workers)
        optim.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optim.step()
        log.step(number + 1)
        if (number + 1) % SAVE_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                saved = None
                if rank == 0:
                    state = {"model": model.state_dict(), "optimizer": optim.state_dict(), "step": number + 1}
                    torch.save(state, Path(folder) / "state.pt")
                    saved = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({"step": number + 1}, checkpoint=saved)


def main() -> None:
    folder, width, rate, steps, workers = sys.argv[1:6]
    if len(sys.argv) > 6:
        ray.init(address=sys.argv[6], log_to_driver=False)
    else:
        ray.init(address="local", num_cpus=int(workers) + 1, include_dashboard=False, _temp_dir=f"/tmp/pr{os.getpid()}")
    TorchTrainer(
        train,
        train_loop_config={"folder": folder, "width": int(width), "rate": float(rate), "steps": int(steps)},
        scaling_config=ray.train.ScalingConfig(num_workers=int(workers), placement_strategy="SPREAD"),
        run_config=ray.train.RunConfig(
            name="recovery",
            storage_path=f"{folder}/ray",
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
