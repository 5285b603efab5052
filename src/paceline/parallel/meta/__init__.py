"""Models without their weights: parts of a forward on the meta device or on invented values, fake weights, and trees
of tensors; may import parallel.tensor.
"""
