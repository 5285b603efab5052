"""Pipeline parallelism: a model's units are partitioned into stages, and its forward is recorded once as a tape.

`find_stages.py` chooses the stages. `tape_recorder.py` records the forward, `stage_replay.py` runs one stage's part of
it, and `stage_worker.py` follows the schedule (`paceline.schedule.pipeline`). May import torch, `plan`, `schedule`,
`comm`, `parallel.meta` and `parallel.tensor`.
"""
