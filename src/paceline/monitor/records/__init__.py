"""Reads what a run leaves in its directory: run.json, events, merged steps, attempts, failures, processes; imports
only the ground modules.
"""
