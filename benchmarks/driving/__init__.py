"""What the benchmarks that disturb whole runs have in common."""
