"""Move tensors and small messages between workers."""
