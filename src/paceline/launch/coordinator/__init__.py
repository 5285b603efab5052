"""Rendezvous of a job's hosts, the coordinator that decides for the whole job, and the agents of the other hosts.
May import launch.fork, launch.snapshots, launch.io, launch.job and elastic.
"""
