"""Logs of lines that may grow for months: old lines are merged, compressed and sealed. Imports no torch."""
