"""How the process groups of a job find each other: the key-value store, torch's Store over it, and the rendezvous of
workers started by srun or mpirun. May import comm.messages.
"""
