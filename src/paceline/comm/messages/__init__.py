"""Messages between processes: lines of JSON over a socket, tensors over ZeroMQ, and the HMAC handshake that proves the
job's token. May import no other room of comm.
"""
