"""Process groups of elastic runs: rebuilt for each generation of members, aborted when a peer is lost, with the workers
of a replica in lockstep; imports comm.group, comm.allreduce and the flight recorder.
"""
