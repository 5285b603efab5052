"""Synchronous data parallelism: gradients of all replicas are reduced in buckets while backward runs.

All-reduce, Adasum, codec state and gradient norms. Imports nothing else of sync.
"""
