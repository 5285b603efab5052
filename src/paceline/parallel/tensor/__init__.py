"""Tensor parallelism: split the layers of an ordinary model over the workers of one replica (Megatron-LM).

`find_plan.find_plan` chooses the layers and `apply.apply_plan` splits them. `split_tensor.py` and the rule files let
the model's own code run on the parts. May import torch, `plan`, `schedule` and the loose files of `parallel`; no other
axis.
"""
