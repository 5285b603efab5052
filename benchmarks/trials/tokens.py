"""Models whose tokens or experts can be divided: what context and expert parallel are for."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trials.models import CLASSES, LENGTH, WORDS, adamw, next_word, sentences, tokens_first
from trials.registry import Outcome, fit, program

WIDTH = 32


class Attention(nn.Module):
    """Heads over one projection of queries, keys and values."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = (part.view(samples, length, 4, -1).transpose(1, 2) for part in self.qkv(x).split(width, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out(mixed.transpose(1, 2).reshape(samples, length, width))


class Block(nn.Module):
    """Attention, and a perceptron or something in its place."""

    def __init__(self, *, is_causal: bool = True, feed: nn.Module | None = None) -> None:
        super().__init__()
        self.norm_1, self.mix = nn.LayerNorm(WIDTH), Attention(is_causal=is_causal)
        plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.norm_2, self.feed = nn.LayerNorm(WIDTH), feed if feed is not None else plain

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm_1(x))
        return x + self.feed(self.norm_2(x))


class Words(nn.Module):
    """Words and their places."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))


class Experts(nn.ModuleList):
    """Called with tokens, each token's experts and their weights."""

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self):
            rows, slot = torch.where(index == number)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, slot, None])
        return out


class Routed(nn.Module):
    """Each token goes to two of four experts; the loss that makes their use even is kept in `auxiliary`."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = Experts(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(4)
        )
        self.auxiliary = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        chances = self.router(tokens).softmax(1)
        weights, index = chances.topk(2, dim=1)
        self.auxiliary = (F.one_hot(index, 4).float().mean((0, 1)) * chances.mean(0)).sum() * 4
        return self.experts(tokens, index, weights).view(x.shape)


@program("a GPT with scaled_dot_product_attention, written by hand")
def gpt(worker: Any) -> Outcome:
    torch.manual_seed(0)
    model = worker.prepare(nn.Sequential(Words(), Block(), Block(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)))
    return fit(worker, model, adamw(worker, model), sentences(), next_word, clip_norm=0.5)


@program("an encoder that classifies by the mean over its tokens")
def pooled_encoder(worker: Any) -> Outcome:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = Words(), nn.Linear(WIDTH, CLASSES)
            self.blocks = nn.ModuleList([Block(is_causal=False), Block(is_causal=False)])

        def forward(self, words: Tensor) -> Tensor:
            x = self.words(words)
            for block in self.blocks:
                x = block(x)
            return self.out(x.mean(dim=1))

    torch.manual_seed(0)
    model = worker.prepare(Net())
    return fit(worker, model, adamw(worker, model), sentences(classes=CLASSES), F.cross_entropy)


@program("a mixture of experts, written by hand")
def routed(worker: Any) -> Outcome:
    torch.manual_seed(0)
    blocks = [Block(feed=Routed()), Block(feed=Routed())]
    model = worker.prepare(nn.Sequential(Words(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)))
    return fit(worker, model, adamw(worker, model), sentences(), next_word, clip_norm=0.5)


@program("a mixture of experts with a loss for their even use, which is of each micro-batch")
def routed_evenly(worker: Any) -> Outcome:
    torch.manual_seed(0)
    blocks = [Block(feed=Routed()), Block(feed=Routed())]
    model = worker.prepare(nn.Sequential(Words(), *blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)))

    def forward(model: nn.Module, micro: Any) -> Tensor:
        words, target = micro
        loss = next_word(model(words), target)
        return loss + 0.1 * sum(one.auxiliary for one in model.modules() if isinstance(one, Routed))

    return fit(worker, model, adamw(worker, model), sentences(), forward=forward)


@program("transformers: Qwen3-MoE, stacked experts", needs="transformers")
def qwen_moe(worker: Any) -> Outcome:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    config = Qwen3MoeConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = worker.prepare(tokens_first(config, Qwen3MoeForCausalLM))
    return fit(worker, model, adamw(worker, model), sentences(), next_word)
