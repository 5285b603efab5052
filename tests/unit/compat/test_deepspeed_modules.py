"""DeepSpeed's parts that need no run: pipelines as modules, loaders, optimizers by its names, zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from paceline.compat.deepspeed import zero
from paceline.compat.deepspeed.accelerator import get_accelerator
from paceline.compat.deepspeed.data import MicroBatchLoader, RepeatingLoader
from paceline.compat.deepspeed.engine_checkpoints import EngineCounts, SavedEngine
from paceline.compat.deepspeed.optimizers import DeepSpeedCPUAdam, FusedAdam
from paceline.compat.deepspeed.pipeline import LayerSpec, PipelineModule, TiedLayerSpec
from paceline.errors import CheckpointError, PlanError


def test_layers_run_one_after_the_other_and_tied_ones_share_their_weight() -> None:
    head = lambda layer, found: found @ layer.weight.t()  # noqa: E731  # as programs write it
    layers: list[Any] = [
        TiedLayerSpec("embed", nn.Embedding, 10, 4),
        LayerSpec(nn.Linear, 4, 4),
        torch.tanh,
        TiedLayerSpec("embed", nn.Embedding, 10, 4, forward_fn=head),
    ]
    net = PipelineModule(layers, num_stages=1)
    assert len(list(net.parameters())) == 3
    words = torch.tensor([[1, 2]])
    table, line = net.layers[0].weight, net.layers[1]
    assert torch.equal(net(words), torch.tanh(line(table[words])) @ table.t())  # type: ignore[index,operator]  # of nn.Module


def test_activation_checkpointing_changes_no_gradient() -> None:
    found: list[torch.Tensor] = []
    for interval in (0, 2):
        torch.manual_seed(0)
        net = PipelineModule(
            [LayerSpec(nn.Linear, 3, 3), nn.ReLU(), LayerSpec(nn.Linear, 3, 1)],
            num_stages=1,
            activation_checkpoint_interval=interval,
        )
        net(torch.ones(2, 3, requires_grad=True)).sum().backward()
        found.append(torch.cat([one.grad.flatten() for one in net.parameters() if one.grad is not None]))
    assert torch.equal(found[0], found[1])


def test_seeded_layers_do_not_depend_on_the_ones_before() -> None:
    one = PipelineModule([LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 2)], num_stages=1, seed_layers=True)
    two = PipelineModule([nn.ReLU(), LayerSpec(nn.Linear, 2, 2)], num_stages=1, seed_layers=True)
    assert torch.equal(one.layers[1].weight, two.layers[1].weight)  # type: ignore[arg-type]  # of nn.Module


@pytest.mark.parametrize(
    ("layers", "options", "text"),
    [
        ([nn.ReLU()], {}, "give num_stages"),
        ([nn.ReLU()], {"num_stages": 2, "topology": object()}, "topology"),
        ([nn.ReLU()], {"num_stages": 0}, "must be at least 1"),
        ([], {"num_stages": 1}, "there is no layer"),
        ([3], {"num_stages": 1}, "a layer is a int"),
    ],
)
def test_pipelines_that_cannot_be_are_refused(layers: list[Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        PipelineModule(layers, **options)


def test_workers_are_a_multiple_of_the_stages() -> None:
    net = PipelineModule([nn.ReLU()], num_stages=2)
    assert net.count_stages(4) == 2
    with pytest.raises(PlanError, match="Use --workers 2"):
        net.count_stages(3)


def test_a_loader_gives_each_worker_its_share_in_the_order_of_a_distributed_sampler() -> None:
    data = TensorDataset(torch.arange(10))
    shares = [
        [
            number
            for (micro,) in MicroBatchLoader(
                data,
                batch_size=2,
                workers=2,
                index=index,
                sampler=None,
                shuffle=False,
                collate=None,
                loaders=0,
                drop_last=False,
            )
            for number in micro.tolist()
        ]
        for index in range(2)
    ]
    assert shares == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_a_repeating_loader_has_no_end() -> None:
    loader = RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
    assert len(loader) == 2


def test_deepspeeds_adam_is_torchs_adamw_without_decay() -> None:
    parameter = nn.Parameter(torch.zeros(1))
    for made in (FusedAdam([parameter]), DeepSpeedCPUAdam([parameter])):
        assert isinstance(made, torch.optim.AdamW)
        assert made.defaults["weight_decay"] == 0.0
    with pytest.raises(PlanError, match="adam_w_mode=False"):
        FusedAdam([parameter], adam_w_mode=False)


def test_before_initialize_a_model_is_whole() -> None:
    with zero.Init(remote_device="cpu"):
        net = nn.Linear(2, 2)
    with zero.GatheredParameters(net.weight, modifier_rank=0), torch.no_grad():
        net.weight.fill_(1.0)
    assert net.weight.sum() == 4


def test_the_cpu_is_a_device_by_all_names() -> None:
    accelerator = get_accelerator()
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    assert (accelerator.device_name(0), accelerator.current_device_name(), accelerator.is_available()) == (
        "cpu",
        "cpu",
        True,
    )
    accelerator.set_device(0)
    assert accelerator.communication_backend_name() == "gloo"


def test_what_is_to_be_saved_is_plain_and_in_a_folder_of_its_own(tmp_path: Any) -> None:
    for tag in ("", "..", "a/b"):
        with pytest.raises(CheckpointError, match="must be the name of a folder"):
            SavedEngine(tmp_path, tag, {}, is_latest=True)
    with pytest.raises(CheckpointError, match="cannot store args: <object>"):
        SavedEngine(tmp_path, "one", {"args": object()}, is_latest=True)


def test_counts_come_back() -> None:
    first, second = EngineCounts(), EngineCounts()
    first.global_steps, first.skipped_steps = 7, 2
    second.load_state_dict(first.state_dict())
    assert (second.global_steps, second.skipped_steps, second.micro_steps) == (7, 2, 0)
