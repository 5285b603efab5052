"""The work of `recovery.py` under torchrun, with a checkpoint every few steps: FOLDER WIDTH RATE STEPS."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from recover_work import SAVE_EVERY, Log, make_data, make_model, share
from torch.nn.parallel import DistributedDataParallel

FOLDER, WIDTH, RATE, STEPS = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])


def main() -> None:
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    model, data = DistributedDataParallel(make_model(WIDTH)), make_data()
    optim = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    saved, done = FOLDER / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optim.load_state_dict(state["optimizer"])
        done = state["step"]
    log = Log(FOLDER, rank)
    for number in range(done, STEPS):
        x, y = share(data, number, rank, workers)
        optim.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optim.step()
        log.step(number + 1)
        if (number + 1) % SAVE_EVERY == 0 and rank == 0:
            partial = saved.with_suffix(f".{os.getpid()}")
            torch.save({"model": model.state_dict(), "optimizer": optim.state_dict(), "step": number + 1}, partial)
            partial.replace(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
