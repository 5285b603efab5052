"""Check a model against a plan before anything is split: every obstacle, and the memory that each worker needs.

`paceline plan --check` and `worker.prepare` call it. May import everything else in `parallel`.
"""
