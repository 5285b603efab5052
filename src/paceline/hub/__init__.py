"""Models of a hub: from a folder, a cache or object storage to a model whose weights nobody has read yet.

Weights stay what they are: bytes of safetensors files, mapped into memory. `worker.prepare` reads what it keeps of
them. So this package finds files, looks at their headers, and lets transformers make the model.
"""
