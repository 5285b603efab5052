"""Errors to plant into the layouts' own code, one at a time, and runs that show if parity finds and places them."""
