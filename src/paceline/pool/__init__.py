"""A pool shares the devices of one machine among many runs, and resizes them while they train.

`policy.py` decides, as a pure function of what runs measure: `admission.py` (which runs), `weights.py` and `sizes.py`
(on how many), `packing.py` (where), `reasons.py` (in words). `pool_run.py` is a run as it was queued, on disk.
`throughput.py` fits how a run's speed grows with its replicas. `run_control.py` starts, resizes and stops runs, and
reads how they do. `service.py` brings these together; `follow.py` is what `paceline run --pool` shows.
"""
