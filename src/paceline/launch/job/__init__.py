"""The state of a running job as plain data and pure functions: where workers run, how they ended, how all restart.
May import elastic, but no other room of launch.
"""
