"""Make replicas agree."""
