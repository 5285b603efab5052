"""Replicas that take steps by themselves and average weights now and then: local SGD, DiLoCo and gossip.

May import sync.allreduce.
"""
