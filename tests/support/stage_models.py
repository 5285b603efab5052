"""Small models that stages are tested on, each with its forward (which returns the loss) and micro-batches for it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["HUGGING_FACE", "PLAIN", "Case", "make"]

DROPOUT = 0.1


@dataclasses.dataclass(kw_only=True)
class Case:
    """A model in double precision, its forward, and micro-batches, the last of them smaller."""

    model: nn.Module
    forward: Callable[[Any], Tensor]
    micros: list[Any]


def make(name: str, *, num_micro: int = 3) -> Case:
    """Build the case called `name`, always with the same weights and data."""
    torch.manual_seed(0)
    case = {**PLAIN, **HUGGING_FACE}[name]([4] * (num_micro - 1) + [2])
    case.model.double().train()
    return case


class Block(nn.Module):
    """A pre-norm Transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.drop = nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, *, mask: Tensor, angle: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(query * angle.cos(), key * angle.cos(), value, attn_mask=mask)
        x = x + self.drop(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.mlp(self.mlp_norm(x))


@dataclasses.dataclass
class Output:
    """What the Transformer returns."""

    logits: Tensor
    hidden: dict[str, Tensor]


class Tied(nn.Module):
    """A Transformer with tied embeddings, a mask and angles computed once, a dropout and a scale at the root."""

    angles: Tensor

    def __init__(self, vocabulary: int = 31, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.scale = nn.Parameter(torch.full((width,), 1.5))
        self.register_buffer("angles", torch.linspace(0, 1, width // 2))
        self.drop = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Output:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = places[:, None] >= places
        angle = places[:, None] * self.angles
        first = self.drop(self.embed(tokens)) * self.scale
        x = first
        for block in self.blocks:
            x = block(x, mask=mask, angle=angle)
        x = x + 0.1 * first  # a skip over every cut
        return Output(self.head(self.norm(x)), {"last": x})


class Skip(nn.Module):
    """An MLP with a skip over the cut, changes in place, a buffer, and a unit that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.middle = nn.Linear(12, 12)
        self.again = nn.Linear(12, 12)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        early = torch.relu(self.first(x))
        h = torch.relu_(self.norm(early))
        h = torch.tanh(self.middle(h))
        h = self.again(self.again(h))
        h += early
        h[:, 0] = early[:, 1]
        return {"logits": self.last(h)}


class Basic(nn.Module):
    """A residual block of a ResNet."""

    def __init__(self, wide: int, wider: int, stride: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(wide, wider, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norm_one, self.norm_two = nn.BatchNorm2d(wider), nn.BatchNorm2d(wider)
        self.relu = nn.ReLU(inplace=True)
        self.short = nn.Sequential(nn.Conv2d(wide, wider, 1, stride, bias=False), nn.BatchNorm2d(wider))

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm_two(self.two(self.relu(self.norm_one(self.one(x)))))
        out += self.short(x)
        return self.relu(out)


class ResNet(nn.Module):
    """Stem, three groups of two blocks, pooling, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.relu = nn.Conv2d(3, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Basic(4, 4, 1), Basic(4, 4, 1))
        self.layer2 = nn.Sequential(Basic(4, 8, 2), Basic(8, 8, 1))
        self.layer3 = nn.Sequential(Basic(8, 16, 2), Basic(16, 16, 1))
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.norm(self.stem(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Mixer(nn.Module):
    """A block of a few layers."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.drop(torch.tanh(self.linear(x))))


class Pictures(nn.Module):
    """A Vision Transformer's root: views of parameters, one of them without gradients, and the user's checkpoints."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant
        drop = DROPOUT if reentrant is None else 0.0  # the oracle's own numbers would be others when it runs again
        self.patch, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.token, self.places = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 9, 8))
        self.query = nn.Parameter(torch.randn(3, 8))
        self.blocks = nn.ModuleList(Mixer(drop) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.query[:1].expand(len(x), -1).unsqueeze(1)
        x = torch.cat([self.token.expand(len(x), -1, -1), self.patch(x)], dim=1) * scale
        x = x + self.places[:, : x.shape[1]]
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(lambda x, block=block: x + 2 * block(x), x, use_reentrant=self.reentrant)
        return self.head(x[:, 0] + self.query.expand(len(x), -1, -1).mean(dim=1))


class Sign(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Reversed(torch.autograd.Function):
    """Passes two tensors on, and reverses the gradients."""

    @staticmethod
    def forward(one: Tensor, other: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        return one.view_as(one), other.view_as(other)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.strength = inputs[2]

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -ctx.strength * one, -2 * ctx.strength * other, None


class Noisy(torch.autograd.Function):
    """Adds noise, and scales the gradient by it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.noise = torch.rand_like(x)
        return x + ctx.noise

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient * ctx.noise


class Binary(nn.Module):
    """A layer whose weight is rounded, with an estimator inside."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Sign.apply(self.linear.weight), self.linear.bias)


class Estimators(nn.Module):
    """Functions with a backward of their own: on inputs, between units, over a cut, and inside a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.binary, self.last = nn.Linear(6, 8), nn.Linear(8, 8), Binary(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        early = self.first(Sign.apply(x) + x)
        h = self.binary(Noisy.apply(self.middle(Sign.apply(early))))
        h, again = Reversed.apply(torch.tanh(h), early, 0.5)
        return self.last(h * again)


def tied(sizes: list[int]) -> Case:
    model = Tied()

    def forward(tokens: Tensor) -> Tensor:
        logits = model(tokens).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Case(model=model, forward=forward, micros=[torch.randint(0, 31, (size, 9)) for size in sizes])


def skip(sizes: list[int]) -> Case:
    model = Skip()
    micros = [(torch.randn(size, 6).double(), torch.randint(0, 3, (size,))) for size in sizes]
    return Case(model=model, forward=lambda m: F.cross_entropy(model(m[0])["logits"], m[1]), micros=micros)


def estimators(sizes: list[int]) -> Case:
    model = Estimators()
    micros = [(torch.randn(size, 6).double(), torch.randint(0, 3, (size,))) for size in sizes]
    return Case(model=model, forward=lambda m: F.cross_entropy(model(m[0]), m[1]), micros=micros)


def resnet(sizes: list[int]) -> Case:
    model = ResNet()
    micros = [(torch.randn(size, 3, 8, 8).double(), torch.randint(0, 5, (size,))) for size in sizes]
    return Case(model=model, forward=lambda m: F.cross_entropy(model(m[0]), m[1]), micros=micros)


def _language(model_class: str, config_class: str, sizes: list[int], **config: Any) -> Case:
    transformers = pytest.importorskip("transformers")
    settings = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **config}
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(vocab_size=61, **settings))

    def micro(size: int) -> dict[str, Tensor]:
        tokens = torch.randint(3, 61, (size, 10))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    return Case(model=model, forward=lambda m: model(**m).loss, micros=[micro(size) for size in sizes])


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


def gpt2(sizes: list[int]) -> Case:
    return _language("GPT2LMHeadModel", "GPT2Config", sizes, n_embd=16, n_layer=4, n_head=4, n_positions=16)


def llama(sizes: list[int]) -> Case:
    return _language("LlamaForCausalLM", "LlamaConfig", sizes, num_key_value_heads=2, **SMALL)


def bert(sizes: list[int]) -> Case:
    return _language("BertForMaskedLM", "BertConfig", sizes, max_position_embeddings=16, **SMALL)


def t5(sizes: list[int]) -> Case:
    small = {"d_model": 16, "d_ff": 32, "d_kv": 4, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
    return _language("T5ForConditionalGeneration", "T5Config", sizes, **small)


def mixtral(sizes: list[int]) -> Case:
    more = {"num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "eager"}
    more["output_router_logits"] = True  # hooks collect them, and the loss of all layers is in the loss
    return _language("MixtralForCausalLM", "MixtralConfig", sizes, **SMALL, **more)


def vit(sizes: list[int]) -> Case:
    transformers = pytest.importorskip("transformers")
    model = transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=DROPOUT, **SMALL)
    )
    micros = [
        {"pixel_values": torch.randn(size, 3, 8, 8).double(), "labels": torch.randint(0, 5, (size,))} for size in sizes
    ]
    return Case(model=model, forward=lambda m: model(**m).loss, micros=micros)


def _pictures(sizes: list[int], *, reentrant: bool | None = None) -> Case:
    model = Pictures(reentrant=reentrant)
    micros = [(torch.randn(size, 7, 6).double(), torch.randint(0, 5, (size,))) for size in sizes]
    return Case(model=model, forward=lambda m: F.cross_entropy(model(m[0]), m[1]), micros=micros)


PLAIN: dict[str, Callable[[list[int]], Case]] = {
    "tied": tied,
    "skip": skip,
    "estimators": estimators,
    "resnet": resnet,
    "views": _pictures,
    "checkpoints": functools.partial(_pictures, reentrant=False),
    "reentrant_checkpoints": functools.partial(_pictures, reentrant=True),
}
HUGGING_FACE: dict[str, Callable[[list[int]], Case]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "mixtral": mixtral,
}
