"""Checks that need a device, one file each in `checks`; `benchmarks/accelerator.py` runs them within a limit."""
