"""Small models with routed experts, written in the ways that the protocol allows, for tests of Layout(experts=n)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["WIDTH", "WORDS", "AttendingMoeNet", "ListedExperts", "MoeNet", "RoutedBlock", "StackedExperts"]

WORDS, WIDTH, LENGTH, NUM_EXPERTS, TOP = 48, 16, 8, 4, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class ListedExperts(nn.ModuleList):
    """Experts that are modules of their own; only those that have tokens are called."""

    def __init__(self, count: int = NUM_EXPERTS) -> None:
        super().__init__([Expert() for _ in range(count)])

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self):
            rows, slot = torch.where(index == number)
            if len(rows):
                made = expert(tokens[rows]) * weights[rows, slot, None]
                out = out.index_add(0, rows, made.to(out.dtype))
        return out


class StackedExperts(nn.Module):
    """Experts whose weights are rows of parameters of three dims, and of one."""

    def __init__(self, count: int = NUM_EXPERTS) -> None:
        super().__init__()
        self.num_experts = count
        self.up = nn.Parameter(torch.randn(count, 24, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 24) * 0.2)
        self.gain = nn.Parameter(torch.ones(count))

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number in range(self.num_experts):
            rows, slot = torch.where(index == number)
            made = F.linear(F.silu(F.linear(tokens[rows], self.up[number])), self.down[number]) * self.gain[number]
            out = out.index_add(0, rows, (made * weights[rows, slot, None]).to(out.dtype))
        return out


class RoutedBlock(nn.Module):
    """A router, its experts, a shared expert, and a loss that wants all experts to have as much to do."""

    def __init__(self, experts: nn.Module, *, count: int = NUM_EXPERTS, favours: int | None = None) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count)
        self.experts, self.shared, self.favours = experts, Expert(), favours
        self.auxiliary = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, 1)
        scores = self.router(tokens)
        if self.favours is not None:  # whatever the token: the others have nothing to do
            scores = scores + 100.0 * F.one_hot(torch.tensor(self.favours), scores.shape[1])
        chances = scores.softmax(1)
        weights, index = chances.topk(1 if self.favours is not None else TOP, dim=1)
        share = F.one_hot(index, chances.shape[1]).to(chances.dtype).mean((0, 1))
        self.auxiliary = (share * chances.mean(0)).sum() + 1e-2 * scores.logsumexp(1).square().mean()
        mixed = self.experts(tokens, index, weights) + self.shared(tokens)
        return x + mixed.view_as(x)


class MoeNet(nn.Module):
    """Two routed blocks between tied embeddings, dropout outside of experts, and a buffer that changes."""

    def __init__(self, kinds: Any = (ListedExperts, StackedExperts), *, drop: float = 0.1, **block: Any) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([RoutedBlock(kind(), **block) for kind in kinds])
        self.drop, self.norm, self.head = nn.Dropout(drop), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, words: Tensor) -> Tensor:
        if self.training:
            self.seen.mul_(0.9).add_(0.1 * words.float().mean())
        x = self.drop(self.words(words) + self.places(torch.arange(words.shape[1])))
        for block in self.blocks:
            x = self.drop(block(x))
        return self.head(self.norm(x))

    @property
    def auxiliary(self) -> Tensor:
        """What the last forward's routing costs."""
        return torch.stack([block.auxiliary for block in self.blocks]).sum()  # pyright: ignore  # torch knows modules of lists as Module only


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.norm(x)).split(width, dim=2)
        query, key, value = (part.view(samples, length, 4, width // 4).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(samples, length, width))


class AttendingMoeNet(nn.Module):
    """Attention and a routed block, twice: a sequence that may be shared, and heads that may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.attentions = nn.ModuleList([Attention(), Attention()])
        self.blocks = nn.ModuleList([RoutedBlock(ListedExperts()), RoutedBlock(StackedExperts())])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        for attention, block in zip(self.attentions, self.blocks, strict=True):
            x = block(attention(x))
        return self.head(self.norm(x))

    @property
    def auxiliary(self) -> Tensor:
        """What the last forward's routing costs."""
        return torch.stack([block.auxiliary for block in self.blocks]).sum()  # pyright: ignore  # torch knows modules of lists as Module only
