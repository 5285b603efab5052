"""Datasets: streams that are cut into lanes with state; imports `schedule` only."""
