"""A small Llama with adapters (LoRA), for tests of fine-tuning."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WORDS = torch.randint(2, 32, (16, 8), generator=torch.Generator().manual_seed(1))


def base() -> Any:
    """The same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    sizes: Any = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))


def adapted(rank: int = 2) -> Any:
    """The base with LoRA in each layer, and a head that is trained whole."""
    import peft

    given: Any = peft
    config = given.LoraConfig(r=rank, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"])
    return given.get_peft_model(base(), config)


def loss_of(model: Any, micro: tuple[Tensor]) -> Tensor:
    return model(input_ids=micro[0], labels=micro[0]).loss
