"""Models for the tests of shared sequences: those of the tests of cut layers, and some that treat positions oddly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_models import CASES as TENSOR_CASES
from tensor_models import TOKENS, Case, hugging_face, seeded, tokens

LENGTH = 13  # tokens: no number of workers divides it


class OwnAttention(nn.Module):
    """Its own rotary embedding and causal buffer, and fewer heads for keys."""

    def __init__(self, width: int, num_heads: int, num_key_heads: int) -> None:
        super().__init__()
        self.heads, self.key_heads, self.size = num_heads, num_key_heads, width // num_heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * num_key_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril()[None, None], persistent=False)
        self.mask: Tensor

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        angles = torch.arange(T, device=x.device)[:, None] / 100 ** torch.linspace(0, 1, self.size // 2)
        q = self.turn(self.q(x).view(B, T, self.heads, self.size).transpose(1, 2), angles)
        k, v = self.kv(x).chunk(2, dim=-1)
        k = self.turn(k.view(B, T, self.key_heads, self.size).transpose(1, 2), angles)
        v = v.view(B, T, self.key_heads, self.size).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:, :, :T, :T], enable_gqa=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))

    @staticmethod
    def turn(x: Tensor, angles: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Own(nn.Module):
    """A Transformer as people write it; the target is its input, shifted inside the loss."""

    def __init__(self, *, width: int = 32, num_heads: int = 4, num_key_heads: int = 1) -> None:
        super().__init__()
        self.wte = nn.Embedding(TOKENS, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.blocks = nn.ModuleList(OwnAttention(width, num_heads, num_key_heads) for _ in range(2))
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + block(norm(x))
        return self.head(x)


class TimeFirst(nn.Module):
    """torch's encoder with tokens in the first dim, a mask, and two kinds of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0), 2)
        self.head = nn.Linear(64, 7)

    def forward(self, idx: Tensor) -> Tensor:
        causal = torch.full((len(idx), len(idx)), float("-inf")).triu(1)
        h = self.encoder(self.embed(idx), mask=causal)
        return self.head(torch.cat((h[-1], h.mean(0)), -1))


def _shifted(model: Any, dtype: torch.dtype) -> Tensor:
    idx = tokens(LENGTH)
    logits = model(idx)
    return F.cross_entropy(logits[:, :-1].reshape(-1, TOKENS), idx[:, 1:].reshape(-1))


def _classes(model: Any, dtype: torch.dtype) -> Tensor:
    return F.cross_entropy(model(tokens(LENGTH).T), torch.tensor([1, 0, 3]))


def _labelled(model: Any, dtype: torch.dtype, **given: Any) -> Tensor:
    """The model's own loss, or one in double precision: transformers' own are in single, whatever the model is in."""
    given = given or {"input_ids": tokens(LENGTH), "labels": tokens(LENGTH, seed=6)}
    out = model(**given)
    if dtype is not torch.float64:
        return out.loss
    return F.cross_entropy(out.logits.flatten(0, 1), given["labels"].flatten())


def _padded(model: Any, dtype: torch.dtype) -> Tensor:
    """Samples of different lengths, padding left out of attention and loss."""
    idx, mask = tokens(LENGTH), torch.ones(3, LENGTH, dtype=torch.long)
    mask[1, 9:] = 0
    mask[2, 4:] = 0
    labels = tokens(LENGTH, seed=6).masked_fill(mask == 0, -100)
    return _labelled(model, dtype, input_ids=idx, attention_mask=mask, labels=labels)


def _vectors(model: Any, dtype: torch.dtype) -> Tensor:
    return (model(seeded((3, LENGTH, 32), dtype)) * seeded((3, LENGTH, 32), dtype, 7)).sum()


CASES = {
    **{name: Case(make=TENSOR_CASES[name].make, loss=_labelled) for name in ("gpt2", "llama", "bert", "t5", "mixtral")},
    "vit": TENSOR_CASES["vit"],
    "nano": TENSOR_CASES["nano"],
    "own": Case(make=Own, loss=_shifted),
    "time_first": Case(make=TimeFirst, loss=_classes),
    "encoder": Case(make=TENSOR_CASES["encoder"].make, loss=_vectors),
    "bert_padded": Case(make=lambda: hugging_face("bert"), loss=_padded),
    "llama_padded": Case(make=lambda: hugging_face("llama"), loss=_padded),
    "llama_eager": Case(make=lambda: hugging_face("llama", attn_implementation="eager"), loss=_padded),
    "gpt2_ring": Case(make=lambda: hugging_face("gpt2", n_embd=36, n_head=3), loss=_padded),
    "llama_ring": Case(
        make=lambda: hugging_face("llama", hidden_size=48, num_attention_heads=6, num_key_value_heads=3), loss=_padded
    ),
}
HUGGING_FACE = {name for name in CASES if name.split("_")[0] in ("gpt2", "llama", "bert", "t5", "mixtral", "vit")}


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = CASES[name].make().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # biases of zero and norms of one would hide mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()
