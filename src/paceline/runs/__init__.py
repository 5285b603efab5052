"""`paceline.run`, and one run seen from outside its workers: attempts, restarts after lost workers, and the monitor
thread for worlds without a supervisor. May import launch and monitor.
"""
