"""Goodput: where every second of a run went and what each incident cost, as a table, JSON and an HTML page; imports
status, console and records.
"""
