"""Decides which replicas take part in a run, and how that changes while the run goes on.

`membership` decides without any I/O, so a test can drive thousands of simulated workers through it.
`membership_messages` lists what the coordinator and the workers send each other. May import comm, codec, checkpoint,
environment and plan; no torch.
"""
