"""Datasets: streams that are cut into lanes with state, and mixtures; imports `schedule` only."""
