"""Collectives and point-to-point transfers of the workers of one host, in memory that they share; imports only
comm.group.
"""
