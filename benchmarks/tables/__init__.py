"""Published measurements as cases of the planner: reading rows, fitting constants, and what the tables say."""
