"""Start workers somewhere and see them end."""
