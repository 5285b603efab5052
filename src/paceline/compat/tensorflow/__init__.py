"""Programs of TensorFlow, which distributes them by itself: Paceline starts, watches and restarts them, and knows no
step of theirs.

`task.work` is the entry of each of the run's processes. It starts the program in a Python of its own (`child`), with
its place in the cluster (`cluster`) in the variable TF_CONFIG, and looks after it to its end.
"""
