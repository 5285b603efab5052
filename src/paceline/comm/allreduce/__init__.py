"""All-reduce algorithms (ring, trees, halving-doubling, hierarchical) that execute a schedule over point-to-point
transfers; imports comm.group, comm.shared_memory and paceline.schedule.
"""
