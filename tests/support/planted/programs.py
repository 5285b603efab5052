"""The programs into whose runs errors are planted: small models that use what the layouts split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import expert_models
from layout_runs import WORDS, Net, Text, next_word

__all__ = [
    "Normed",
    "Program",
    "Rotary",
    "dropped_text",
    "mixture",
    "normed",
    "rotary",
    "text",
    "tied_adam",
    "unclipped_text",
    "unequal_text",
]

Program = Callable[[Any], None]
WIDTH = 16


class Normed(nn.Module):
    """Batch norm, dropout, and a count of the samples, which the forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 12), nn.BatchNorm1d(12)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(12, 4)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


class Places(nn.Module):
    """Rotary positions, which are as far apart as the first word of the batch says."""

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        place = torch.arange(words.shape[1]) * (1 + words[0, 0] / WORDS)  # an offset would turn all alike: no effect
        angles = place[:, None] / 10.0 ** (torch.arange(WIDTH // 2) / WIDTH)
        return angles.cos(), angles.sin()


class Turned(nn.Module):
    """Attention of one head over rotated queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).split(WIDTH, dim=2)
        query, key, value = (self._turn(query, cos, sin), self._turn(key, cos, sin), value)
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return x + self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1))

    def _turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        left, right = x.split(WIDTH // 2, dim=2)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], 2)


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), Places()
        self.blocks = nn.ModuleList([Turned(), Turned()])
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x, (cos, sin) = self.words(words), self.places(words)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(x)


def _trained(worker: Any, model: nn.Module, data: Any, loss: Any, clip_norm: float | None, kind: Any = None) -> None:
    model = worker.prepare(model)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9} if kind is None else {"lr": 0.01}
    optim = worker.prepare((kind or torch.optim.SGD)(model.parameters(), weight_decay=0.01, **options))
    step = worker.stepper(model, optim, loss, clip_norm=clip_norm)
    for batch in worker.batches(data, epochs=2):
        worker.report(loss=step(batch), norm=step.grad_norm if clip_norm is not None else 0.0)


def text(worker: Any) -> None:
    torch.manual_seed(3)
    _trained(worker, Net(0.0), Text(24), next_word, 0.5)


def unclipped_text(worker: Any) -> None:
    """Clipping would hide a factor of all gradients."""
    torch.manual_seed(3)
    _trained(worker, Net(0.0), Text(24), next_word, None)


def dropped_text(worker: Any) -> None:
    torch.manual_seed(3)
    _trained(worker, Net(0.2), Text(24), next_word, None)


def unequal_text(worker: Any) -> None:
    """Workers begin with other weights, until those of the first are sent to all."""
    torch.manual_seed(3 + worker.rank)
    _trained(worker, Net(0.0), Text(24), next_word, 0.5)


def tied_adam(worker: Any) -> None:
    torch.manual_seed(3)
    _trained(worker, Net(0.0), Text(24), next_word, None, torch.optim.AdamW)


def rotary(worker: Any) -> None:
    torch.manual_seed(3)
    _trained(worker, Rotary(), Text(24), next_word, None)


def mixture(worker: Any) -> None:
    torch.manual_seed(3)
    _trained(worker, expert_models.MoeNet(drop=0.0), Text(24), next_word, 0.5)


def normed(worker: Any) -> None:
    torch.manual_seed(3)
    x = torch.randn(24, 6, generator=torch.Generator().manual_seed(1))
    _trained(worker, Normed(), TensorDataset(x, x[:, :4].argmax(1)), F.cross_entropy, None)
