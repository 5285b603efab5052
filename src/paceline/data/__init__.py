"""Datasets: streams that are cut into lanes with state, mixtures; imports `schedule` and `storage` only."""
