"""Six small models on made-up data, for `benchmarks/planned_here.py`: `paceline run six_models.py --model NAME`."""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import paceline

BATCH = 64


class Residual(nn.Module):
    """x + f(norm(x))."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    layers = [layer for _ in range(3) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(1024, 10)), torch.randn(1024, 1024), torch.arange(1024) % 10


def blocks() -> tuple[nn.Module, Tensor, Tensor]:
    each = [
        Residual(nn.LayerNorm(384), nn.Sequential(nn.Linear(384, 1536), nn.GELU(), nn.Linear(1536, 384)))
        for _ in range(6)
    ]
    return nn.Sequential(*each, nn.Linear(384, 10)), torch.randn(1024, 384), torch.arange(1024) % 10


def convolutions() -> tuple[nn.Module, Tensor, Tensor]:
    each = [Residual(nn.GroupNorm(4, 32), nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU())) for _ in range(4)]
    ends = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)]
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), *each, *ends)
    return model, torch.randn(512, 3, 32, 32), torch.arange(512) % 10


def encoder() -> tuple[nn.Module, Tensor, Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    x = torch.randn(512, 32, 256)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), x, x


class Causal(nn.Module):
    """A block of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.into(x).view(samples, length, 3, self.heads, -1).transpose(1, 3)
        query, key, value = parts.unbind(2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))


class Gpt(nn.Module):
    """A small GPT over 256 words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 192)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Residual(nn.LayerNorm(192), Causal(192, 6)),
                Residual(nn.LayerNorm(192), nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192))),
            )
            for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, 256)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    words = torch.randint(0, 256, (512, 64))
    return Gpt(), words, words


class Recurrent(nn.Module):
    """An LSTM, of which the last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 192, batch_first=True), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def recurrent() -> tuple[nn.Module, Tensor, Tensor]:
    return Recurrent(), torch.randn(512, 32, 64), torch.arange(512) % 10


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor, Tensor]]] = {
    "mlp": mlp,
    "blocks": blocks,
    "convolutions": convolutions,
    "encoder": encoder,
    "gpt": gpt,
    "recurrent": recurrent,
}


def loss(out: Tensor, target: Tensor) -> Any:
    """Cross entropy of classes (for a GPT at every place), or the squared error."""
    if target.is_floating_point():
        return F.mse_loss(out, target)
    return F.cross_entropy(out.flatten(0, -2), target.flatten())


def train(worker: paceline.Worker, name: str) -> None:
    """Train it for as many steps as are wanted."""
    torch.manual_seed(1)
    made, inputs, targets = MODELS[name]()
    model = worker.prepare(made)
    optimizer = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4))
    step = worker.stepper(model, optimizer, loss)
    for batch in worker.batches(TensorDataset(inputs, targets), epochs=1000):
        step(batch)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    chosen = parser.parse_args().model
    paceline.run(lambda worker: train(worker, chosen), plan=f"batch(size={BATCH},micro=8)")
