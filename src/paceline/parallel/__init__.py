"""Model parallelism: fully sharded, tensor, pipeline, context and expert parallel, one package for each axis.

`apply.py` places a model on its workers as the layout says, and `check` reports beforehand what does not work. May
import torch, `comm`, `codec`, `checkpoint`, `plan` and `schedule`; nothing of `sync` or `worker`.
"""
