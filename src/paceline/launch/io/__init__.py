"""The supervisor's event loop, its message streams, connections that prove the job's token, and the signals that end a
job. May import comm.messages, but no other room of launch.
"""
