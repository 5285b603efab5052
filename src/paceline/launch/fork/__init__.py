"""Starts and ends the worker processes of one host: the warm parent (a fork server that has imported torch), the
forked worker, and their locks and lifetimes; imports launch.io, launch.job and launch.snapshots.
"""
