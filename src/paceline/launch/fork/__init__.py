"""Starts and ends the worker processes of one host: the warm parent (a fork server that has imported torch), the forked
workers, their locks and their lifetimes. May import launch.snapshots, launch.io and launch.job.
"""
