"""Launches a job as torchrun or Horovod elastic do: starts its workers on one or many hosts, supervises them to the
job's end, and restarts them after a loss. Imports no torch and nothing of the worker.
"""
