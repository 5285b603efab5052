"""What lives inside a run: the worker, its step, its data."""
