"""Parameter servers, both sides: synchronous, asynchronous with bounded staleness, backup workers, mirrors, embedding
tables; may import sync.allreduce.
"""
