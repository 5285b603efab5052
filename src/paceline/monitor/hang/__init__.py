"""Finds hangs, mismatched collectives and stragglers from the workers' flight recorders and stacks; imports console,
records and comm.
"""
