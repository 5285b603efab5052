"""Programs as users write them, for `program_matrix.py`: each trains a few steps, and knows nothing of the plan."""
