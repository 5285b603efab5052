"""The plain torch loop that `paceline parity --bare` compares with: one process, and none of Paceline's step code. It
imports nothing of sync, parallel, worker.step and worker.loop; what a step means is written here a second time.
"""
