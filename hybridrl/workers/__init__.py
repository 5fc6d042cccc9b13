"""A rank: one process that hosts roles and holds the samples that live there.

Start from `BaseWorker` (`base_worker.py`: a rank of any pool) and `ActorWorker` (`actor_worker.py`:
phases, generation, samples). The actor is a `Trainer` (`trainer.py`) and a `Generator`
(`generator.py`), which do not know each other; `colocated.py` has both on one device.
"""
