"""Who takes part in a run, and how that changes while it goes on.

`membership` decides; it does no I/O, so a test can drive thousands of pretended workers through it. `notices` is what
the decider and the workers say to each other.
"""
