"""The driver of one run: phases, worker groups, the executor, checkpoints, evaluation, records.

Start from `train` (`train.py`: a run from its config to its last line), `WorkerGroup`
(`worker_group.py`: typed calls to the ranks) and `RayExecutor` (`ray_executor.py`: the schedule's
requests as calls to ranks).
"""
