"""Engines put a job onto hosts that somebody else manages: one file each for SSH, Slurm, Kubernetes and Ray.

An engine renders what it sends as text, submits it, and then tells the job's state, shows its console, resizes and
stops it. What runs on each host is an ordinary `paceline run` of a job with several hosts. May import the plan and the
environment, and nothing else of the launch.
"""
