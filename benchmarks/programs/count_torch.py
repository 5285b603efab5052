"""The same Llama split by hand, for torchrun: OUT.RANK holds what its last step sent.

WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT
"""

import sys

import torch
import torch.distributed as dist
from counted import Counts, Dispatched
from tensor_by_hand import split_by_hand
from tensor_model import llama, next_byte_loss, text
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS, OUT = (*map(int, sys.argv[1:7]), sys.argv[7])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    batches = iter(DataLoader(text(STEPS * SAMPLES * MICROS), batch_size=SAMPLES))
    counts = Counts()
    model = llama(WIDTH, LAYERS, HEADS)
    split_by_hand(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for _ in range(STEPS):
        counts.found.clear()
        with Dispatched(counts):
            for _ in range(MICROS):
                x, y = next(batches)
                (next_byte_loss(model(input_ids=x).logits, y) / MICROS).backward()
            optim.step()
            optim.zero_grad()
    counts.write(OUT, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
