"""Lets torchvision be imported beside a torch without CUDA; tests/conftest.py imports this before timm or transformers.

The wheels of PyPI hold operators that need CUDA's libraries. Where those cannot be loaded, torchvision registers fake
kernels for operators that do not exist, and fails. Models of timm use none of them: declaring their names is enough.
"""

from __future__ import annotations

import torch

_OPERATORS = ("nms", "qnms")
_declared = torch.library.Library("torchvision", "FRAGMENT")  # kept: the names end with the object

for name in _OPERATORS:
    if not torch._C._dispatch_has_kernel(f"torchvision::{name}"):
        _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
