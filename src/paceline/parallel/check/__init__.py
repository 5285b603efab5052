"""Look at a model and a plan before anything is cut: what stands against it, what each worker would have."""
