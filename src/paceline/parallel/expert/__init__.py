"""Expert parallel: routed experts are spread over workers and tokens travel to them; may import parallel.meta and
parallel.tensor.
"""
