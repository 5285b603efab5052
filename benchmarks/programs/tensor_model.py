"""The model that both programs split by tensor parallelism: a small Llama of the transformers package, on the example's
text.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from gpt import standard_library, windows

__all__ = ["llama", "next_byte_loss", "text"]


def llama(width: int, layers: int, heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def text(count: int) -> TensorDataset:
    """So many pairs of bytes and the bytes after them."""
    corpus, _ = standard_library()
    return windows(corpus, count)


def next_byte_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())
