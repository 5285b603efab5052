"""What another terminal asks of a run: status, logs, stop; imports console and records."""
