"""One worker under Paceline, as its plan says. DEVICE and the words of `options_work`."""

import sys

from options_work import OnDevice, adamw, model, next_byte_loss, samples

import paceline


def train(worker: paceline.Worker) -> None:
    data = samples()
    measured = OnDevice(worker.device)
    net = worker.prepare(model())
    optim = worker.prepare(adamw(net, on_host=worker.plan.compute.offload == "all"))
    step = worker.stepper(net, optim, next_byte_loss, clip_norm=1.0)
    for batch in worker.batches(data):
        worker.report(loss=step(batch))
        measured.step()
    measured.end(worker.rank)


if __name__ == "__main__":
    paceline.run(
        train, device="cuda" if sys.argv[1] == "cuda" else "cpu", threads=1, save_at_end=False, tensorboard=False
    )
