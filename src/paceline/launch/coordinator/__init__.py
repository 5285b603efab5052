"""How the hosts of a job meet, who decides for the whole job (the coordinator), and how every other host follows it.
May import launch.fork, launch.snapshots, launch.io, launch.job and elastic.
"""
