"""Pipeline stages of ordinary models: every stage runs the model's own code, and absent modules answer with ghosts."""
