"""Optimizers that look at more than each number by itself, some of them only after a while."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from trials.loops import held_out, net
from trials.models import vectors
from trials.registry import EPOCHS, Outcome, fit, program

MUON_LIMIT = 1e-3  # it multiplies in bfloat16, and products of rows are added in another order


def _fit(worker: Any, made: Any) -> Outcome:
    model = worker.prepare(net())
    return fit(worker, model, worker.prepare(made(model)), vectors(), F.cross_entropy)


@program("pytorch_optimizer: AdamP projects by rows", needs="pytorch_optimizer")
def adam_p(worker: Any) -> Outcome:
    from pytorch_optimizer import AdamP

    return _fit(worker, lambda model: AdamP(model.parameters(), lr=1e-2, weight_decay=0.1))


@program("torch.optim.Adafactor: factored second moments")
def adafactor(worker: Any) -> Outcome:
    return _fit(worker, lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2))


@program("torch.optim.Muon for matrices, AdamW for the rest", limit=MUON_LIMIT)
def muon(worker: Any) -> Outcome:
    model = worker.prepare(net())
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim != 2]
    optims = [worker.prepare(torch.optim.Muon(matrices, lr=1e-2)), worker.prepare(torch.optim.AdamW(others, lr=1e-2))]
    step = worker.stepper(model, optims, F.cross_entropy)
    losses = [float(step(batch)) for batch in worker.batches(vectors(), epochs=EPOCHS)]
    return Outcome(losses=losses, others={"held_out": held_out(worker, model)})


@program("pytorch_optimizer: Shampoo, a preconditioner for each dimension", needs="pytorch_optimizer")
def shampoo(worker: Any) -> Outcome:
    from pytorch_optimizer import Shampoo

    return _fit(
        worker, lambda model: Shampoo(model.parameters(), lr=1e-2, preconditioning_compute_steps=2, matrix_eps=0.1)
    )


@program("pytorch_optimizer: LAMB, a trust ratio for each layer", needs="pytorch_optimizer")
def lamb(worker: Any) -> Outcome:
    from pytorch_optimizer import Lamb

    return _fit(worker, lambda model: Lamb(model.parameters(), lr=1e-2))


@program("torch.optim.LBFGS with a closure, in the plain loop")
def lbfgs(worker: Any) -> Outcome:
    model = worker.prepare(net())
    optim = worker.prepare(torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3))
    losses: list[float] = []
    for batch in worker.batches(vectors(), epochs=1):

        def closure(batch: Any = batch) -> torch.Tensor:
            optim.zero_grad()
            total = torch.zeros(())
            for x, y in batch:
                loss = F.cross_entropy(model(x), y)
                worker.backward(loss)
                total += loss.detach() * len(x)
            return total

        optim.step(closure)
        losses.append(held_out(worker, model))
    return Outcome(losses=losses)
