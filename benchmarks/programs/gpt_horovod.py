"""The example's GPT as its program for Horovod is written: OUT.RANK holds its times. Nothing in it knows Paceline."""

import sys
from pathlib import Path

import horovod.torch as hvd
import torch
from measured import Measured
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

WIDTH, LAYERS, HEADS, SAMPLES, STEPS = map(int, sys.argv[1:6])
OUT = sys.argv[6]


def main() -> None:
    hvd.init()
    torch.set_num_threads(1)
    text, _ = standard_library()
    data = windows(text, STEPS * SAMPLES * hvd.size())
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, batch_size=SAMPLES, sampler=sampler)
    model = GPT(WIDTH, LAYERS, HEADS)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optim = hvd.DistributedOptimizer(optim, named_parameters=model.named_parameters())
    measured = Measured()
    for x, y in loader:
        optim.zero_grad()
        loss = next_byte_loss(model(x), y)
        loss.backward()
        optim.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optim.skip_synchronize():
            optim.step()
        loss.item()  # for a log line, as every script has
        measured.step()
    measured.write(OUT, hvd.rank())
    hvd.shutdown()


if __name__ == "__main__":
    main()
