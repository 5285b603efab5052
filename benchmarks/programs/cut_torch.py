"""The same Llama cut by torch's `parallelize_module` by hand, for torchrun.

WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from cut_model import CUT, llama, next_byte_loss, text
from measured import Measured
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS, OUT = (*map(int, sys.argv[1:7]), sys.argv[7])


def styles() -> dict[str, Any]:
    """The usual plan; the embedding and the head are divided by words."""
    plan: dict[str, Any] = {
        name: ColwiseParallel() if role == "column" else RowwiseParallel() for name, role in CUT.items()
    }
    plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return plan


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    loader = DataLoader(text(STEPS * SAMPLES * MICROS), batch_size=SAMPLES)
    measured = Measured()
    model: Any = llama(WIDTH, LAYERS, HEADS)
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), styles())
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
