"""A wide network on a small batch under torch's DistributedDataParallel: OUT.RANK holds its times."""

import importlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measured import Measured
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from wide_net import Pairs, wide_net

WIDTH, LAYERS, SAMPLES, STEPS = map(int, sys.argv[1:5])
OUT, BACKEND = sys.argv[5:7]


def main() -> None:
    torch.set_num_threads(1)
    if BACKEND != "gloo":
        importlib.import_module("paceline").register_backend(BACKEND)
    dist.init_process_group(BACKEND)
    data = Pairs(WIDTH, STEPS * SAMPLES * dist.get_world_size())
    loader = DataLoader(data, batch_size=SAMPLES, sampler=DistributedSampler(data))
    model = DistributedDataParallel(wide_net(WIDTH, LAYERS))
    optim = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    measured = Measured()
    for x, y in loader:
        optim.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optim.step()
        loss.item()  # for a log line, as every script has
        measured.step()
    measured.write(OUT, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
