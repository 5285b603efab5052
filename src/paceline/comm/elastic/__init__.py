"""Groups that are built anew for each generation of the members, abort when a peer is lost, and keep the workers of a
replica in lockstep; imports comm.group, comm.allreduce and the flight recorder.
"""
