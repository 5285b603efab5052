"""The same tiny model under DistributedDataParallel: notes when its first step was made."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(out: Path) -> None:
    """Train in a process group that stands; `out` is for the time of the first step."""
    data = TensorDataset(torch.randn(64, 32), torch.randint(10, (64,)))
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    )
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(loader):
        optim.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optim.step()
        if number == 0 and dist.get_rank() == 0:
            out.write_text(str(time.time()))


def main() -> None:
    dist.init_process_group("gloo")
    train(Path(sys.argv[1]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
