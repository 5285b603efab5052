"""Gradient compression: codecs shrink what travels between replicas; each is the running form of a `Wire` of the plan.

Every codec is a generator of payloads (`base.py`), so it does no communication itself. May import torch and `plan`.
"""
