"""Readers of a run's events."""
