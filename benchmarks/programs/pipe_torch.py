"""The example's GPT in stages by hand, with torch's pipelining, for torchrun: OUT.RANK holds its times and its memory.

SCHEDULE WIDTH LAYERS HEADS SAMPLES STEPS MICROS OUT, where a step has MICROS micro-batches of SAMPLES.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measured import Measured
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import GPT, next_byte_loss, standard_library, windows

SCHEDULE, WIDTH, LAYERS, HEADS, SAMPLES, STEPS, MICROS, OUT = (sys.argv[1], *map(int, sys.argv[2:8]), sys.argv[8])
SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    index, count = dist.get_rank(), dist.get_world_size()
    text, _ = standard_library()
    loader = DataLoader(windows(text, STEPS * SAMPLES * MICROS), batch_size=SAMPLES * MICROS)
    measured = Measured()
    torch.manual_seed(0)
    model = GPT(WIDTH, LAYERS, HEADS)
    kept: list[nn.Module] = list(model.blocks)[LAYERS * index // count : LAYERS * (index + 1) // count]
    kept = [*([model.byte] if index == 0 else []), *kept, *([model.head] if index == count - 1 else [])]
    module = nn.Sequential(*kept)
    del model
    stage = PipelineStage(module, index, count, torch.device("cpu"))
    schedule = SCHEDULES[SCHEDULE](stage, n_microbatches=MICROS, loss_fn=next_byte_loss)
    optim = torch.optim.AdamW(module.parameters(), lr=1e-3, foreach=False)
    for x, y in loader:
        losses: list[Tensor] = []
        if index == 0:
            schedule.step(x)
        elif index == count - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optim.step()
        optim.zero_grad()
        mean = torch.stack(losses).mean().detach().view(1) if losses else torch.zeros(1)
        dist.broadcast(mean, count - 1)  # for a log line, as every script has
        measured.step()
    measured.write(OUT, index)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
