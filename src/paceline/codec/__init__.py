"""Shrink what travels between replicas: the running form of a Wire."""
