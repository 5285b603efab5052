"""How a worker joins the run and how its members do an operation together, survive a lost member, and are asked to
leave (SIGTERM, preemption); imports `topology`.
"""
