"""The supervisor's event loop, message streams, token authentication between hosts, and the signals that end a job.
May import comm.messages, but no other room of launch.
"""
