"""Expert parallelism: routed experts are distributed over workers, and tokens travel to them.

`find_experts.py` recognizes routed experts, `verify.py` tries that they can be separated, `apply.py` distributes them,
and `token_dispatch.py` sends the tokens. May import torch, `plan`, `parallel.tensor`, `parallel.meta` and the loose
files of `parallel`.
"""
