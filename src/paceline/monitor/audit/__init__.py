"""Proves from the sample ledgers that every sample of an epoch was used exactly once; imports records."""
