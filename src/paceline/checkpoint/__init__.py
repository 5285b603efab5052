"""Keep tensors on disk: write, commit, find, read, export."""
