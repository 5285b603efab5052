"""The work of `recovery.py` under Horovod Elastic, which keeps its state in memory every few steps: FOLDER WIDTH RATE
STEPS HOSTS.

Horovod's own rank changes with each loss, so a process is named by its place: that of the host that it was given.
"""

import os
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd  # pyright: ignore[reportMissingImports]  # installed only where it is measured
import torch
import torch.nn.functional as F
from recover_work import SAVE_EVERY, Log, make_data, make_model, share

FOLDER, WIDTH, RATE, STEPS = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
HOSTS = sys.argv[5].split(",")


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    model, data = make_model(WIDTH), make_data()
    optim = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    optim = hvd.DistributedOptimizer(optim, named_parameters=model.named_parameters())
    log = Log(FOLDER, HOSTS.index(os.environ["HOROVOD_HOSTNAME"]))

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            x, y = share(data, state.step, hvd.rank(), hvd.size())
            optim.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optim.step()
            state.step += 1
            log.step(state.step)
            if state.step % SAVE_EVERY == 0:
                state.commit()

    train(hvd.elastic.TorchState(model=model, optimizer=optim, step=0))


if __name__ == "__main__":
    main()
