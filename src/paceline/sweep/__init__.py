"""Sweeps: Optuna proposes and prunes trials, and a pool runs them. Optuna is imported nowhere else."""
