"""How replicas agree on gradients or weights: all-reduce, local SGD and gossip, or parameter servers.

May import torch, `comm`, `codec`, `checkpoint`, `plan` and `schedule`; nothing of `parallel` or `worker`.
"""
