"""The example's GPT under torch's DistributedDataParallel on far sites: the same weights, samples and steps."""

import numpy as np
import torch
import torch.distributed as dist
from sites_work import GPT, SEED, WORK, Diary, data, next_byte_loss, optimizer, warm_up
from torch.nn.parallel import DistributedDataParallel

from paceline.schedule.sample_order import sample_indices


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    training, held_out = data()
    torch.manual_seed(SEED)
    model = DistributedDataParallel(GPT())
    optim = optimizer(model)
    schedule = warm_up(optim)
    order = sample_indices(seed=0, epoch=0, num_samples=len(training), positions=np.arange(len(training)))
    dist.barrier()
    diary = Diary(rank)
    for number in range(1, WORK.steps + 1):
        positions = order[(number - 1) * WORK.batch : number * WORK.batch]
        x, y = training[torch.from_numpy(np.array_split(positions, workers)[rank])]
        optim.zero_grad()
        loss = next_byte_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        schedule.step()
        diary.step(number, loss.item())
        if number % WORK.every == 0:
            diary.pause()
            mean = judged(model, [one[rank::workers] for one in held_out.tensors])
            diary.resume(number, mean)
            if mean <= WORK.target:
                break
    dist.destroy_process_group()


@torch.no_grad()
def judged(model: torch.nn.Module, share: list[torch.Tensor]) -> float:
    x, y = share
    total = torch.stack([next_byte_loss(model(x), y) * len(x), torch.tensor(float(len(x)))])
    dist.all_reduce(total)
    return float(total[0] / total[1])


if __name__ == "__main__":
    main()
