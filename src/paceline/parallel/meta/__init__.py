"""Models without their weights: forwards on the meta device or on invented values, fake weights, and trees of tensors.

`paceline plan --check`, pipeline recording and context trials use it. May import torch and `parallel.tensor`.
"""
