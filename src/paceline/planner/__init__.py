"""Predict what a plan costs on a model and a cluster: seconds, by part, and bytes. Without torch, and without I/O but
for reading and writing its own files."""
