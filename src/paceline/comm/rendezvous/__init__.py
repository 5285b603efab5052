"""How the process groups of a job find each other: the key-value store, torch's Store over it, and the rendezvous of
workers that srun or mpirun has started; imports only comm.messages.
"""
