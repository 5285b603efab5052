"""The event loop of a supervisor: non-blocking message streams, connections that prove the job's token, and the
signals that end a job; imports only paceline.comm.messages.
"""
