"""What one worker writes into the run directory: events, sample ledger, parity captures, error.json, flight recorder;
imports `data`.
"""
