"""`generate` of transformers under each layout: the tokens of one process, or a sentence that says what to do."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from forked import WorkersFailed, World
from paceline.plan import Batch, Layout, Plan

PLAN = Plan(batch=Batch(size=8, micro=2))
WORDS = torch.randint(2, 32, (16, 8), generator=torch.Generator().manual_seed(1))


def decoder() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    rates: Any = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
    ends: Any = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, **rates, **ends))


def encoder_and_decoder() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Any = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**sizes, **{"dropout_rate": 0.0, "decoder_start_token_id": 0}))


def loss_of(model: Any, micro: tuple[Tensor]) -> Tensor:
    return model(input_ids=micro[0], labels=micro[0]).loss


def generated(worker: Any, make: Any) -> Any:
    torch.manual_seed(3)
    model = worker.prepare(make())
    step = worker.stepper(model, worker.prepare(torch.optim.SGD(model.parameters(), lr=0.1)), forward=loss_of)
    for batch in worker.batches(TensorDataset(WORDS)):
        step(batch)
    model.eval()
    with torch.no_grad():
        return model.generate(WORDS[:2], attention_mask=torch.ones(2, 8), max_new_tokens=4, do_sample=False).tolist()


def both(worker: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for make in (decoder, encoder_and_decoder):
        try:
            found[make.__name__] = generated(worker, make)
        except Exception as error:  # whatever it says is judged
            found[make.__name__] = f"{type(error).__name__}: {error}"
    return found


REFUSED = {
    ("decoder", 2): r"GPT2LMHeadModel was called outside of step\(batch\) .* worker.state_dict\(model\)",
    ("encoder_and_decoder", 1): r"a part of the model was called by itself, .* worker.state_dict\(model\)",
    (
        "encoder_and_decoder",
        2,
    ): r"call parts of the model by themselves \(as generate\(\) .* worker.state_dict\(model\)",
}


def reported(worker: Any) -> None:
    """As a script does that catches nothing."""
    generated(worker, encoder_and_decoder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    for kind in ("gpt2", "t5"):
        pytest.importorskip(f"transformers.models.{kind}.modeling_{kind}")  # once, for all workers
    return World(tmp_path_factory.mktemp("alone")).one_process(both, PLAN)


@pytest.mark.parametrize("layout", [Layout(replicas=2), Layout(tensor=2), Layout(shard=2), Layout(stages=2)], ids=str)
def test_generate_gives_the_tokens_of_one_process_or_says_what_to_do(
    world: World, alone: dict[str, Any], layout: Layout
) -> None:
    for found in world(both, 2, Plan(layout=layout, batch=PLAN.batch), save_at_end=False):
        if layout.stages == 1:
            assert found["decoder"] == alone["decoder"]
        else:
            assert re.search(REFUSED["decoder", 2], found["decoder"])
        if layout.stages == layout.shard == 1:
            assert found["encoder_and_decoder"] == alone["encoder_and_decoder"]
    if layout.stages > 1 or layout.shard > 1:
        with pytest.raises(WorkersFailed, match=REFUSED["encoder_and_decoder", layout.stages]):
            world(reported, 2, Plan(layout=layout, batch=PLAN.batch), save_at_end=False)
