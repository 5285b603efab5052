"""Observes a run from its files: console, status, hangs and stragglers, reports, metrics for other programs. Imports no
torch.
"""
