"""Moves tensors and small messages between workers: groups, shared memory, all-reduce algorithms, elastic groups,
rendezvous. May import environment, plan and schedule.
"""
