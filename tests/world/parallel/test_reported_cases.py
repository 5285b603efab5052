"""Silent errors that other frameworks have had, as their threads report them: the same models are right here.

The gradients of the first step, put together from all workers, and their norm are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from expert_models import AttendingMoeNet
from forked import World
from layout_runs import EXACT, ROWS, Net, Text, beside, next_word, workers_of
from paceline.plan import Batch, Layout, Plan

BATCH = Batch(size=8, micro=2)
WORDS = 48  # of the models of transformers


def olmoe() -> nn.Module:
    """transformers #48687: with "batched_mm" the router had a wrong gradient, and the loss was right."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    chosen: Any = {"experts_implementation": "batched_mm"}  # declared by a base class of configurations
    config = OlmoeConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=False,
        pad_token_id=0,
        use_cache=False,
        **chosen,
    )
    return OlmoeForCausalLM(config)


def qwen3() -> nn.Module:
    """Megatron-LM #7452: a norm of heads that is whole on all workers had a part of its gradient's sum on each."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def own_loss(model: Any, micro: tuple[Tensor, Tensor]) -> Tensor:
    return model(input_ids=micro[0], labels=micro[0]).loss


def plain_loss(model: Any, micro: tuple[Tensor, Tensor]) -> Tensor:
    return next_word(model(micro[0]), micro[1])


CASES: dict[str, tuple[Layout, Callable[[], nn.Module], Any, str]] = {  # and what the gradients' names end with
    "transformers_48687": (Layout(experts=2), olmoe, own_loss, "mlp.gate.weight"),
    # pretrain_gpt: the last layer norm's gradient was another on each worker.
    "megatron_1446": (Layout(tensor=2, sequence=True), lambda: Net(0.0), plain_loss, "norm.weight"),
    # A mixture with tensor and expert parallel: the norm of the gradients left out some experts.
    "megatron_5916": (Layout(tensor=2, experts=2), AttendingMoeNet, plain_loss, "experts.up"),
    "megatron_7452": (Layout(tensor=2), qwen3, own_loss, "q_norm.weight"),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_their_norm_are_those_of_one_process(case: str, world: World, tmp_path: Path) -> None:
    layout, make, loss_of, wanted = CASES[case]
    if loss_of is own_loss:
        pytest.importorskip("transformers.models.olmoe.modeling_olmoe")  # once, for all workers
        pytest.importorskip("transformers.models.qwen3.modeling_qwen3")

    def run(worker: Any) -> tuple[float, float]:
        torch.manual_seed(3)
        model = worker.prepare(make())
        optim = worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        step = worker.stepper(model, optim, forward=loss_of, clip_norm=1e9)
        (loss,) = (float(step(batch)) for batch in worker.batches(Text(ROWS)))
        return loss, float(step.grad_norm)

    places = [tmp_path / "whole", tmp_path / "split"]
    expected = beside(tmp_path)(run, 1, Plan(batch=BATCH, compute=EXACT), max_steps=1, capture_dir=str(places[0]))[0]
    plan = Plan(layout=layout, batch=BATCH, compute=EXACT)
    for found in world(run, workers_of(layout), plan, max_steps=1, capture_dir=str(places[1])):
        assert found == pytest.approx(expected, rel=1e-6)  # models of transformers compute losses in single precision
    whole, split = (load_file(place / "gradients_1.safetensors") for place in places)
    assert split.keys() == whole.keys()
    assert any(name.endswith(wanted) and bool(whole[name].any()) for name in whole)
    for name, gradient in whole.items():
        torch.testing.assert_close(split[name], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
