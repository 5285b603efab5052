"""Copies of a run's checkpoints in object storage: upload behind training, retention, download at a start."""
