"""Environments: programs that answer a model's turns, one for each sample, without torch or Ray.

Start from `program.py` (what a user writes, and what it sees of the model), `load.py` (the kinds),
`episode.py` (one program that runs), `worker.py` (the inside of a sandbox) and `pool.py` (the
driver's side).
"""

from hybridrl.environments.openings import Openings
from hybridrl.environments.pool import EpisodePool
from hybridrl.environments.task import (
    ChatMessage,
    EpisodeStart,
    EpisodeStep,
    EpisodeTask,
    FailureKind,
    ModelTurn,
    PastTurn,
    as_before,
    failed,
)
from hybridrl.sandbox import BusySpan

__all__ = [
    "BusySpan",
    "ChatMessage",
    "EpisodePool",
    "EpisodeStart",
    "EpisodeStep",
    "EpisodeTask",
    "FailureKind",
    "ModelTurn",
    "Openings",
    "PastTurn",
    "as_before",
    "failed",
]
