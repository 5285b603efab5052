"""Replicas that take steps by themselves and average weights now and then: local SGD, DiLoCo, gossip; may import
sync.allreduce.
"""
