"""The example's GPT under torch's DistributedDataParallel, as its tutorial writes it: OUT.RANK holds its times."""

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from measured import Measured
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

WIDTH, LAYERS, HEADS, SAMPLES, STEPS = map(int, sys.argv[1:6])
OUT, BACKEND = sys.argv[6:8]


def main() -> None:
    torch.set_num_threads(1)
    if BACKEND != "gloo":
        importlib.import_module("paceline").register_backend(BACKEND)
    dist.init_process_group(BACKEND)
    text, _ = standard_library()
    data = windows(text, STEPS * SAMPLES * dist.get_world_size())
    loader = DataLoader(data, batch_size=SAMPLES, sampler=DistributedSampler(data))
    model = DistributedDataParallel(GPT(WIDTH, LAYERS, HEADS))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    measured = Measured()
    for x, y in loader:
        optim.zero_grad()
        loss = next_byte_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        loss.item()  # for a log line, as every script has
        measured.step()
    measured.write(OUT, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
