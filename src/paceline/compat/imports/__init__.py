"""`paceline import`: checkpoints of other frameworks become the checkpoint that a run of Paceline begins with."""
