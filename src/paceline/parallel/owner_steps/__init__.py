"""Optimizers that look at whole parameters, where workers hold parts: each parameter is stepped by one of them."""
