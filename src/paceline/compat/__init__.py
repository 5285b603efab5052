"""Programs of other frameworks: one package each. The core imports none of it; a worker finds it by name."""
