"""What users do around a model: loops of their own, hooks, writes to weights, several optimizers, odd losses."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.models import CLASSES, SAMPLES, adamw, generator, sgd, vectors
from trials.registry import EPOCHS, Outcome, Rows, fit, program

PENALTY = 0.01


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    inner = [nn.BatchNorm1d(32)] if norm else []
    return nn.Sequential(nn.Linear(8, 32), *inner, nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def held_out(worker: Any, model: nn.Module) -> float:
    return float(worker.evaluate(model, vectors(), {"held_out": F.cross_entropy})["held_out"])


def by_hand(worker: Any, model: nn.Module, optim: Any, *, before_step: Any = None, after_step: Any = None) -> Outcome:
    """The loop without a stepper; after each step the loss of all data."""
    losses: list[float] = []
    for batch in worker.batches(vectors(), epochs=EPOCHS):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
        if before_step is not None:
            before_step()
        optim.step()
        optim.zero_grad()
        if after_step is not None:
            after_step()
        losses.append(held_out(worker, model))
    return Outcome(losses=losses)


@program("the plain loop, with clipping and a scheduler")
def plain_loop(worker: Any) -> Outcome:
    model = worker.prepare(net())
    optim = sgd(worker, model)
    schedule = worker.prepare(torch.optim.lr_scheduler.OneCycleLR(optim, max_lr=0.1, total_steps=20))
    clip = lambda: worker.clip_gradients(0.5)  # noqa: E731
    return by_hand(worker, model, optim, before_step=clip, after_step=schedule.step)


@program("batch norm, evaluated with its running statistics")
def batch_norm(worker: Any) -> Outcome:
    model = worker.prepare(net(norm=True))
    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy)


@program("parameter groups with rates of their own, a frozen layer, and a layer that gets no gradient")
def groups(worker: Any) -> Outcome:
    model: Any = net()
    model.idle = nn.Linear(2, 2)
    model[2].weight.requires_grad_(False)
    parts = [model[0], model[4]]
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))
    model = worker.prepare(model)
    rates = [{"params": part.parameters(), "lr": 0.1 / (1 + place)} for place, part in enumerate(parts)]
    return fit(worker, model, worker.prepare(torch.optim.SGD(rates, weight_decay=0.1)), vectors(), F.cross_entropy)


@program("a hook that scales a gradient")
def scaling_hook(worker: Any) -> Outcome:
    model: Any = net()
    model[0].weight.register_hook(lambda grad: grad * 0.1)
    model = worker.prepare(model)
    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy)


@program("a hook, registered after prepare, that clamps a gradient: that of the whole batch", sees_whole_batches=True)
def clamping_hook(worker: Any) -> Outcome:
    model: Any = worker.prepare(net())
    model[0].weight.register_hook(lambda grad: grad.clamp(-0.001, 0.001))
    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy)


@program("optimizers that step inside backward, by hooks after accumulation")
def steps_in_backward(worker: Any) -> Outcome:
    model = worker.prepare(net())
    own = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        own[parameter].step()  # pyright: ignore[reportArgumentType]  # hooks get parameters
        own[parameter].zero_grad()  # pyright: ignore[reportArgumentType]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.0))
    return fit(worker, model, optim, vectors(), F.cross_entropy)


@program("an L2 penalty on all parameters, in the loss")
def penalty_in_loss(worker: Any) -> Outcome:
    model = worker.prepare(net())

    def forward(model: nn.Module, micro: Any) -> Tensor:
        x, y = micro
        return F.cross_entropy(model(x), y) + PENALTY * sum(p.pow(2).sum() for p in model.parameters())

    return fit(worker, model, sgd(worker, model), vectors(), forward=forward, held_out=None)


@program("weights are projected to a norm after each step, under no_grad")
def max_norm(worker: Any) -> Outcome:
    model: Any = worker.prepare(net())

    def project() -> None:
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight.mul_((0.5 / layer.weight.norm(dim=1, keepdim=True)).clamp(max=1.0))

    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy, after_step=project)


@program("weights are clipped by assigning `.data`, as a Wasserstein critic does")
def assigned_data(worker: Any) -> Outcome:
    model = worker.prepare(net())

    def clip() -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clamp(-0.1, 0.1)

    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy, after_step=clip)


@program("torch.nn.utils.parametrizations: weight norm and spectral norm")
def parametrized(worker: Any) -> Outcome:
    model: Any = net()
    nn.utils.parametrizations.weight_norm(model[0])
    nn.utils.parametrizations.spectral_norm(model[2])
    model = worker.prepare(model)
    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy)


class ActNorm(nn.Module):
    """The first batch sets scale and shift."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set and self.training:
            with torch.no_grad():
                self.scale.copy_(1 / (x.std(0, correction=0) + 0.1))
                self.shift.copy_(-x.mean(0) * self.scale)
            self.is_set = True
        return x * self.scale + self.shift


@program("ActNorm: the first micro-batch sets two parameters, inside of forward")
def act_norm(worker: Any) -> Outcome:
    torch.manual_seed(0)
    model = worker.prepare(nn.Sequential(nn.Linear(8, 32), ActNorm(), nn.Tanh(), nn.Linear(32, CLASSES)))
    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy)


class Queue(nn.Module):
    """MoCo's negatives: keys of earlier samples, in a ring with a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))
        self.keys: Tensor
        self.place: Tensor
        self.register_buffer("keys", F.normalize(torch.randn(20, 8, generator=generator(5)), dim=1))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        found = F.normalize(self.inner(x), dim=1)
        near = F.normalize(self.inner(x + 0.01), dim=1).detach()
        logits = torch.cat([(found * near).sum(1, keepdim=True), found @ self.keys.clone().T], dim=1) / 0.2
        if self.training:
            with torch.no_grad():
                rows = (self.place + torch.arange(len(x))) % len(self.keys)
                self.keys[rows] = near
                self.place.add_(len(x)).remainder_(len(self.keys))
        return F.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


@program("MoCo: a queue of keys, and its pointer, in buffers", sees_whole_batches=True)
def moco(worker: Any) -> Outcome:
    torch.manual_seed(0)
    model = worker.prepare(Queue())
    return fit(worker, model, sgd(worker, model), vectors(), forward=lambda model, micro: model(micro[0]))


@program("SAM: weights go along the gradient for a second one, and back, by `.data`")
def sharpness_aware(worker: Any) -> Outcome:
    model = worker.prepare(net())
    optim = sgd(worker, model)
    losses: list[float] = []
    kept: list[Tensor] = []
    for number, batch in enumerate(worker.batches(vectors(), epochs=EPOCHS)):
        for x, y in batch:
            worker.backward(F.cross_entropy(model(x), y))
        if number % 2 == 0:
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=0.05)
        else:
            for parameter, old in zip(model.parameters(), kept, strict=True):
                parameter.data = old
            optim.step()
        optim.zero_grad()
        losses.append(held_out(worker, model))
    return Outcome(losses=losses)


@program("torch.optim.swa_utils.AveragedModel, updated after each step and evaluated")
def averaged_model(worker: Any) -> Outcome:
    from torch.optim.swa_utils import AveragedModel

    model = worker.prepare(net())
    average = AveragedModel(model)
    found = fit(
        worker,
        model,
        sgd(worker, model),
        vectors(),
        F.cross_entropy,
        after_step=lambda: average.update_parameters(model),
    )
    with torch.no_grad():
        value = float(F.cross_entropy(average(vectors().columns[0]), vectors().columns[1]))
    return Outcome(losses=found.losses, others={**found.others, "average": value})


@program("an exponential moving average by copy.deepcopy and `.data`, swapped in at the end")
def average_by_hand(worker: Any) -> Outcome:
    model = worker.prepare(net())
    shadow = copy.deepcopy(model)

    def follow() -> None:
        for kept, parameter in zip(shadow.parameters(), model.parameters(), strict=True):
            kept.data.mul_(0.9).add_(parameter.data, alpha=0.1)

    found = fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy, after_step=follow)
    for kept, parameter in zip(shadow.parameters(), model.parameters(), strict=True):
        parameter.data.copy_(kept.data)
    return Outcome(losses=found.losses, others={"average": held_out(worker, model)})


@program("a GAN: two models, two optimizers, two steppers on each batch")
def gan(worker: Any) -> Outcome:
    torch.manual_seed(0)
    maker = worker.prepare(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)), name="maker")
    critic = worker.prepare(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), name="critic")
    rates: dict[str, Any] = {"lr": 1e-2, "betas": (0.5, 0.9)}
    of_maker = worker.prepare(torch.optim.Adam(maker.parameters(), **rates))
    of_critic = worker.prepare(torch.optim.Adam(critic.parameters(), **rates))

    def judge(critic: nn.Module, micro: Any) -> Tensor:
        real, noise = micro
        return F.softplus(-critic(real)).mean() + F.softplus(critic(maker(noise).detach())).mean()

    def fool(maker: nn.Module, micro: Any) -> Tensor:
        return F.softplus(-critic(maker(micro[1]))).mean()

    judging = worker.stepper(critic, of_critic, forward=judge)
    fooling = worker.stepper(maker, of_maker, forward=fool)
    data = Rows(torch.randn(SAMPLES, 8, generator=generator()), torch.randn(SAMPLES, 4, generator=generator(1)))
    losses: list[float] = []
    for batch in worker.batches(data, epochs=EPOCHS):
        losses += [float(judging(batch)), float(fooling(batch))]
        of_critic.zero_grad()
    return Outcome(losses=losses)


@program("a gradient penalty: the gradient of a gradient")
def gradient_penalty(worker: Any) -> Outcome:
    model = worker.prepare(net())

    def forward(model: nn.Module, micro: Any) -> Tensor:
        x, y = micro
        x = x.clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.cross_entropy(output, y) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()

    return fit(worker, model, sgd(worker, model), vectors(), forward=forward)


@program("torch.func.functional_call with the model's own parameters")
def functional(worker: Any) -> Outcome:
    model = worker.prepare(net())

    def forward(model: nn.Module, micro: Any) -> Tensor:
        x, y = micro
        return F.cross_entropy(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), y)

    return fit(worker, model, sgd(worker, model), vectors(), forward=forward)


@program("the user's own torch.utils.checkpoint around a layer")
def own_checkpoint(worker: Any) -> Outcome:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.out = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            from torch.utils.checkpoint import checkpoint

            x = torch.tanh(self.one(x))
            x = checkpoint(lambda x: torch.tanh(self.two(x)), x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
            return self.out(x)

    torch.manual_seed(0)
    model = worker.prepare(Net())
    return fit(worker, model, sgd(worker, model), vectors(), F.cross_entropy)


@program("a contrastive loss within a micro-batch, embeddings normalized")
def contrastive(worker: Any) -> Outcome:
    model = worker.prepare(net())

    def forward(model: nn.Module, micro: Any) -> Tensor:
        x, _ = micro
        found = F.normalize(model(x), dim=1)
        near = F.normalize(model(x * 1.1), dim=1)
        return F.cross_entropy(found @ near.T / 0.1, torch.arange(len(x)))

    return fit(worker, model, sgd(worker, model), vectors(), forward=forward)


@program("a complex-valued layer, clipped by its norm")
def complex_layer(worker: Any) -> Outcome:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64) * 0.3)
            self.out = nn.Linear(16, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            mixed = x.to(torch.complex64) @ self.mix
            return self.out(torch.view_as_real(mixed).flatten(1))

    torch.manual_seed(0)
    model = worker.prepare(Net(), sample=(vectors().columns[0][:2],))
    return fit(worker, model, adamw(worker, model, 1e-2), vectors(), F.cross_entropy, clip_norm=0.1)


@program("torch.amp.GradScaler, whose first step overflows")
def grad_scaler(worker: Any) -> Outcome:
    model = worker.prepare(net())
    optim = sgd(worker, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    losses: list[float] = []
    for number, batch in enumerate(worker.batches(vectors(), epochs=EPOCHS)):
        for x, y in batch:
            loss = F.cross_entropy(model(x), y) * (1.0 if number else 3e38)
            worker.backward(scaler.scale(loss))
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        losses.append(held_out(worker, model))
    return Outcome(losses=losses)


@program("gradients clipped by value in the plain loop")
def clipped_by_value(worker: Any) -> Outcome:
    model = worker.prepare(net())
    clip = lambda: nn.utils.clip_grad_value_(model.parameters(), 0.01)  # noqa: E731
    return by_hand(worker, model, sgd(worker, model), before_step=clip)
