"""A pool shares the devices of machines among many runs, and resizes them while they train.

`policy.py` decides, as a pure function of what runs measure: `admission.py` (which runs), `weights.py` and `sizes.py`
(on how many), `packing.py` (where), `reasons.py` (in words). `pool_run.py` is a run as it was queued, on disk.
`throughput.py` fits how a run's speed grows with its replicas. `run_control.py` starts, resizes and stops runs, and
reads how they do. `node_agent.py` does so on each node, as files say (`node_files.py`), with `part_process.py`;
`part_control.py` says what nodes should have, by `shares.py`, and `nodes.py` which of them there are. `service.py`
brings these together, `serve.py` is one host's part in it, and `follow.py` is what `paceline run --pool` shows.
"""
