"""The example's GPT under Paceline on far sites, until its held-out loss is low enough: see `sites_work.py`."""

import torch
from sites_work import GPT, SEED, WORK, Diary, data, next_byte_loss, optimizer, warm_up

import paceline


def train(worker: paceline.Worker) -> None:
    training, held_out = data()
    torch.manual_seed(SEED)
    model = worker.prepare(GPT())
    optim = worker.prepare(optimizer(model))
    schedule = worker.prepare(warm_up(optim))
    step = worker.stepper(model, optim, next_byte_loss, clip_norm=1.0)
    worker.wait()
    diary = Diary(worker.rank)
    for batch in worker.batches(training):
        loss = float(step(batch))
        schedule.step()
        worker.report(loss=loss)
        diary.step(worker.step, loss)
        if worker.step % WORK.every == 0:
            worker.wait()  # where replicas agree after this step they do it here, while the clock is running
            diary.pause()
            found = worker.evaluate(model, held_out, {"loss": next_byte_loss})["loss"]
            diary.resume(worker.step, found)
            if found <= WORK.target:
                break


if __name__ == "__main__":
    paceline.run(train, threads=1, save_at_end=False, tensorboard=False)
