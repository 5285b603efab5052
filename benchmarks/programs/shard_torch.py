"""The same model with torch's `fully_shard` by hand, for torchrun.

ZERO REPLICAS WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from measured import Measured
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

ZERO, REPLICAS, WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS, OUT = (*map(int, sys.argv[1:9]), sys.argv[9])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workers = dist.get_world_size()
    text, _ = standard_library()
    data = windows(text, STEPS * SAMPLES * MICROS * workers)
    loader = DataLoader(data, batch_size=SAMPLES, sampler=DistributedSampler(data))
    measured = Measured()
    if REPLICAS > 1:
        mesh = init_device_mesh("cpu", (REPLICAS, workers // REPLICAS), mesh_dim_names=("replica", "shard"))
    else:
        mesh = init_device_mesh("cpu", (workers,), mesh_dim_names=("shard",))
    model = GPT(WIDTH, LAYERS, HEADS)
    units = [
        fully_shard(module, mesh=mesh, reshard_after_forward=None if ZERO == 3 else False)
        for module in [*model.blocks, model]
    ]
    for unit in units:
        unit.set_gradient_divide_factor(float(workers * MICROS))
        unit.set_force_sum_reduction_for_comms(True)
    whole = units[-1]  # the model itself
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    batches = iter(loader)
    for _ in range(STEPS):
        total = 0.0
        for number in range(MICROS):
            x, y = next(batches)
            is_last = number == MICROS - 1
            whole.set_requires_gradient_sync(is_last or ZERO > 1)
            whole.set_reshard_after_backward(is_last or ZERO == 3)
            loss = next_byte_loss(model(x), y)
            loss.backward()
            total += float(loss.detach())
        optim.step()
        optim.zero_grad()
        mean = torch.tensor([total / MICROS])
        dist.all_reduce(mean)  # for a log line, as every script has
        measured.step()
    measured.write(OUT, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
