"""Offload: optimizer state and parameters kept outside of the computing device's memory, on the host or on disk."""
