"""Judges of responses, in sandboxes, and reward models.

Start from `judge.py` (`JudgePool`: responses in, results out), `worker.py` (the judge inside a
sandbox, and the verifiers that ship), `functions.py` (a user's function) and `model.py` (what a
reward model must be).
"""

from hybridrl.rewards.judge import JudgePool, validate_reward
from hybridrl.rewards.results import RewardInput, RewardResult
from hybridrl.sandbox import jail  # for users' functions

__all__ = ["JudgePool", "RewardInput", "RewardResult", "jail", "validate_reward"]
