"""Checkpoints on disk: write, commit, find, read, keep the last n, export.

`checkpoint_dir.py` defines what is on disk, `retention.py` deletes, `async_writer.py` and `sharded_writer.py` write,
`reader.py` reads. May import torch, `plan` and the ground modules; nothing of `comm`, `parallel` or `worker`.
"""
