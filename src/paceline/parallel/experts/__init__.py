"""Experts that are spread over workers: which they are, how tokens travel to them, and how a model is made to do so."""
