"""Ordinary models, tiny, and one batch for each: what the tests of cut layers run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = 96


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, and its loss on a batch of three samples."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.dtype], Tensor]


def seeded(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tokens(num: int = 8, seed: int = 5) -> Tensor:
    return torch.randint(TOKENS, (3, num), generator=torch.Generator().manual_seed(seed))


class NanoAttention(nn.Module):
    """As people write it: one projection for queries, keys and values, and sizes from the input's own shape."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.n_head, self.n_embd = num_heads, width
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        scores = (q @ k.transpose(-2, -1)) * (1.0 / (k.size(-1) ** 0.5))
        scores = scores.masked_fill(torch.ones(T, T).tril().view(1, 1, T, T) == 0, float("-inf"))
        y = self.dropout(F.softmax(scores, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class NanoBlock(nn.Module):
    def __init__(self, width: int, num_heads: int, inner: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = NanoAttention(width, num_heads)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, inner), "c_proj": nn.Linear(inner, width), "drop": nn.Dropout(0.0)}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["drop"](self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x)))))


class Nano(nn.Module):
    """A Transformer with tied embeddings."""

    def __init__(
        self, *, width: int = 32, num_heads: int = 4, num_blocks: int = 2, inner: int = 128, words: int = TOKENS
    ) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, width), nn.Embedding(64, width)
        self.h = nn.ModuleList(NanoBlock(width, num_heads, inner) for _ in range(num_blocks))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, words, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class SkipMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.out = nn.Linear(8, 64), nn.Linear(64, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.layer_norm(x + self.down(torch.relu(self.up(x))), (8,)))


def hugging_face(kind: str, **config: Any) -> nn.Module:
    import transformers as hf

    small: dict[str, Any] = {
        "vocab_size": TOKENS,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    llama = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    }
    bert = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    if kind == "gpt2":
        drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}
        return hf.GPT2LMHeadModel(hf.GPT2Config(**{**small, **drop, **sizes, **config}))
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**{**small, **llama, **config}))
    if kind == "mixtral":
        experts = {"num_local_experts": 4, "experts_implementation": "eager"}  # the default has no double precision
        return hf.MixtralForCausalLM(hf.MixtralConfig(**{**small, **llama, **experts, **config}))
    if kind == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
        experts |= {"experts_implementation": "eager"}
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**{**small, **llama, **experts, **config}))
    if kind == "deepseek_v3":
        experts = {
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
        }
        experts |= {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "experts_implementation": "eager"}
        heads = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
        sizes = {**small, **llama, **experts, **heads, "num_key_value_heads": 8}
        return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**{**sizes, **config}))
    if kind == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 4, "experts_implementation": "eager"}
        return hf.GptOssForCausalLM(hf.GptOssConfig(**{**small, **llama, **experts, **config}))
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**{**small, **bert, **config}))
    if kind == "vit":
        image = {"image_size": 16, "patch_size": 4, "num_labels": 10}
        return hf.ViTForImageClassification(hf.ViTConfig(**{**bert, **image, **config}))
    if kind == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        t5 = hf.T5Config(**{**small, **sizes, "decoder_start_token_id": 0, **config})
        return hf.T5ForConditionalGeneration(t5)
    raise ValueError(kind)


def _labelled(model: Any, dtype: torch.dtype) -> Tensor:
    return model(input_ids=tokens(), labels=tokens(seed=6)).loss


def _images(model: Any, dtype: torch.dtype) -> Tensor:
    return model(pixel_values=seeded((3, 3, 16, 16), dtype), labels=torch.tensor([1, 7, 4])).loss


def _next_token(model: Any, dtype: torch.dtype) -> Tensor:
    return F.cross_entropy(model(tokens()).view(-1, TOKENS), tokens(seed=6).view(-1))


def _classes(model: Any, dtype: torch.dtype) -> Tensor:
    return F.cross_entropy(model(seeded((3, 8), dtype)), torch.tensor([1, 0, 3]))


def _vectors(model: Any, dtype: torch.dtype) -> Tensor:
    return (model(seeded((3, 8, 32), dtype)) * seeded((3, 8, 32), dtype, 7)).sum()


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


HUGGING_FACE = {
    kind: Case(make=lambda kind=kind: hugging_face(kind), loss=_labelled)
    for kind in ("gpt2", "llama", "bert", "t5", "mixtral")
}
HUGGING_FACE["vit"] = Case(make=lambda: hugging_face("vit"), loss=_images)
OWN = {
    "nano": Case(make=Nano, loss=_next_token),
    "mlp": Case(make=SkipMLP, loss=_classes),
    "encoder": Case(make=_encoder, loss=_vectors),
}
CASES = HUGGING_FACE | OWN


def build(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = CASES[name].make().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # biases of zero and norms of one would hide mistakes
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()
