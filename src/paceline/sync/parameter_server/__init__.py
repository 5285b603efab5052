"""Parameter servers, both sides: synchronous, asynchronous with bounded staleness, backup workers, mirrors, embeddings.

May import sync.allreduce.
"""
