"""Place a model on its workers as the layout says."""
