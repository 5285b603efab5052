"""The training loop and its modes: synchronous steps, local rounds (local SGD, gossip), asynchronous batches; imports
all other rooms of `worker`, nothing beside them.
"""
