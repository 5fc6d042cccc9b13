"""A rank: one process that hosts roles and holds the samples that live there.

Start from `BaseWorker` (`base_worker.py`: a rank of any pool), `ActorWorker` (`actor_worker.py`:
phases, generation, samples) and `Actor` (`actor.py`: the training shard, the rollout engine and the
switch).
"""
