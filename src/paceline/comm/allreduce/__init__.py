"""All-reduce algorithms that walk a schedule (ring, trees, halving-doubling, hierarchical) over point-to-point
transfers; imports comm.group, comm.shared_memory and paceline.schedule.
"""
