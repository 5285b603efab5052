"""Context parallelism: one long sequence over several workers. Each holds a slice of the tokens, and attention sees all
of them.

`find_plan.find_plan` finds where tokens can be sliced and `apply.apply_plan` installs it. Attention is split by
DeepSpeed-Ulysses (`ulysses.py`) or ring attention (`ring_attention.py`). May import torch, `plan`, `parallel.tensor`,
`parallel.meta` and the loose files of `parallel`.
"""
