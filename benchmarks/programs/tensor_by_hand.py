"""The plan for a Llama that torch's tutorial on large Transformers writes by hand; a block's input is prepared once."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

__all__ = ["split_by_hand"]


def split_by_hand(model: Any, mesh: DeviceMesh) -> None:
    """Split the model in place; the embedding and the head are split along the vocabulary."""
    whole = Replicate()
    ends = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole),
        "lm_head": ColwiseParallel(output_layouts=whole),
    }
    parallelize_module(model, mesh, ends)
    for block in model.model.layers:
        attention = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": whole}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        mlp = PrepareModuleInput(input_layouts=whole, desired_input_layouts=whole)
        plan: dict[str, Any] = {"self_attn": attention, "mlp": mlp}
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
        plan |= {name: ColwiseParallel() for name in columns}
        plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
        parallelize_module(block, mesh, plan)
