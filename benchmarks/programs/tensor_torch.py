"""The same Llama split by torch's `parallelize_module` by hand, for torchrun.

WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT
"""

import sys

import torch
import torch.distributed as dist
from measured import Measured
from tensor_by_hand import split_by_hand
from tensor_model import llama, next_byte_loss, text
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS, OUT = (*map(int, sys.argv[1:7]), sys.argv[7])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loader = DataLoader(text(STEPS * SAMPLES * MICROS), batch_size=SAMPLES)
    measured = Measured()
    model = llama(WIDTH, LAYERS, HEADS)
    split_by_hand(model, init_device_mesh("cpu", (dist.get_world_size(),)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    batches = iter(loader)
    for _ in range(STEPS):
        total = 0.0
        for _ in range(MICROS):
            x, y = next(batches)
            loss = next_byte_loss(model(input_ids=x).logits, y) / MICROS
            loss.backward()
            total += float(loss.detach())
        optim.step()
        optim.zero_grad()
        measured.step()
    measured.write(OUT, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
