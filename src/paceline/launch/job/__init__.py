"""Data and pure functions about a job: which worker runs where, how workers ended, what exit code follows, and the
plan of a restart; no I/O but reading error.json.
"""
