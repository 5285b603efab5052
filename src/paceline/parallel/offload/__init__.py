"""State that is kept outside of the memory of the device that computes."""
