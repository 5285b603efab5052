"""Process groups over sockets that admit no stranger: Unix sockets on one host, authenticated and encrypted TCP between
hosts. May import comm.messages and the base of comm, but no other room.
"""
