"""Collectives and point-to-point transfers between the workers of one host, through shared memory. May import the
modules at the top of comm, such as comm.group.
"""
