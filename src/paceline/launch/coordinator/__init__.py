"""How the hosts of a job meet and decide together: rendezvous, the coordinator on the first host, the agent of every
other host, elastic membership and restarts; imports every room of launch below it.
"""
