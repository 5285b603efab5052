"""`paceline doctor`: what a cluster can do, measured by workers of a run on it, and what is wrong with it."""
