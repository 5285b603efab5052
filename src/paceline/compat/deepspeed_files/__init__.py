"""Reads DeepSpeed's files, its configuration and its checkpoints, and leaves what `import deepspeed` finds alone."""
