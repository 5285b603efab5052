"""Optimizer state in bf16: rounded stochastically after each step, by numbers that any layout draws alike."""
