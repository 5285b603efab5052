"""In-memory checkpoints of a host's workers: kept from one start to the next, and replicated to a neighbor host. May
import launch.io, launch.job and comm.
"""
