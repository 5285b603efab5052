"""Synchronous data parallel: gradients of all replicas are reduced in buckets while backward runs (all-reduce, Adasum,
codec state, norms); imports nothing else of sync.
"""
