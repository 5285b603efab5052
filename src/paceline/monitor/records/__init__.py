"""Reads what a run leaves in its directory: run.json, events, merged steps, attempts, failures; imports only the
ground modules.
"""
