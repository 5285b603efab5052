"""Numerical health: loss spikes, rollback, and replicas whose weights differ; imports `state` and the rooms below."""
