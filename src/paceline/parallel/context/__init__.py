"""One long sequence over several workers: each holds a slice of the tokens, and attention sees all of them."""
