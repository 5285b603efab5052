"""Pipeline parallel: a model's units are dealt to stages, its forward is recorded once as a tape, and each stage
replays its part; may import parallel.meta and parallel.tensor.
"""
