"""Ordinary models, small and randomly initialised, under any layout: the plan decides, the models know of nothing.

    paceline run examples/models.py --workers 4 --plan "tensor=2+batch(size=16,micro=4)" llama
    paceline parity examples/models.py --workers 2,4 --plan "stages=2+batch(size=16,micro=4)" gpt2

Those of the transformers package need it to be installed: gpt2, llama, mixtral, bert, t5, vit. The others are written
here: resnet, transformer (with tied embeddings), mlp (with a skip connection).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import paceline

WORDS, LENGTH, SAMPLES = 96, 16, 320
SPECIAL: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.before(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Transformer(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self, width: int = 32, blocks: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads=4) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1], device=words.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, narrow: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(narrow, wide, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wide, wide, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(narrow, wide, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm_2(self.second(F.relu(self.norm_1(self.first(x)))))
        return F.relu(inner + self.short(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.classes = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classes(self.blocks(self.stem(x)).mean((2, 3)))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.classes = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.classes(x + self.down(torch.tanh(self.up(x))))


def of_transformers(name: str) -> nn.Module:
    """A model of the transformers package, from its own configuration class."""
    import transformers as hf

    llama: dict[str, Any] = {
        **SPECIAL,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "use_cache": False,
    }
    bert: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if name == "gpt2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "use_cache": False}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**SPECIAL, **drop, **sizes))
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**llama))
    if name == "mixtral":
        experts: dict[str, Any] = {"num_local_experts": 4, "experts_implementation": "eager"}
        return hf.MixtralForCausalLM(hf.MixtralConfig(**llama, **experts))
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**SPECIAL, **bert))
    if name == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        start: dict[str, Any] = {"decoder_start_token_id": 0}
        return hf.T5ForConditionalGeneration(hf.T5Config(**SPECIAL, **sizes, **start))
    image: dict[str, Any] = {"image_size": 16, "patch_size": 4, "num_labels": 5}  # 16 patches and one token of its own
    return hf.ViTForImageClassification(hf.ViTConfig(**bert, **image))


OWN: dict[str, Callable[[], nn.Module]] = {"transformer": Transformer, "resnet": ResNet, "mlp": MLP}
LANGUAGE = ("gpt2", "llama", "mixtral", "bert", "t5")


def data_for(name: str) -> Dataset[tuple[Tensor, ...]]:
    """Random inputs and targets of the model's kind."""
    generator = torch.Generator().manual_seed(0)
    if name in (*LANGUAGE, "transformer"):
        words = torch.randint(3, WORDS, (SAMPLES, LENGTH + 1), generator=generator)
        return TensorDataset(words[:, :-1], words[:, 1:])
    shape = (SAMPLES, 16) if name == "mlp" else (SAMPLES, 3, 16, 16)
    return TensorDataset(torch.randn(shape, generator=generator), torch.randint(5, (SAMPLES,), generator=generator))


def loss_of(model: nn.Module, micro: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of a micro-batch; models of the transformers package return more than logits."""
    inputs, target = micro
    if NAME == "t5":
        output: Any = model(input_ids=inputs, decoder_input_ids=inputs)
    else:
        output = model(inputs)
    logits = output if isinstance(output, Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def train(worker: paceline.Worker) -> None:
    torch.manual_seed(1)
    model = worker.prepare(OWN[NAME]() if NAME in OWN else of_transformers(NAME))
    optim = worker.prepare(torch.optim.AdamW(model.parameters(), lr=1e-3))
    step = worker.stepper(model, optim, forward=loss_of, clip_norm=1.0)
    for batch in worker.batches(data_for(NAME), epochs=1):
        worker.report(loss=step(batch))


NAME = sys.argv[1] if len(sys.argv) > 1 else "transformer"

if __name__ == "__main__":
    if NAME not in (*OWN, *LANGUAGE, "vit"):
        raise SystemExit(f"{NAME!r}: use one of {', '.join((*OWN, *LANGUAGE, 'vit'))}")
    paceline.run(train, plan="batch(size=16,micro=4)")
