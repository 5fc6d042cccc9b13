"""Verifiers of responses, in sandboxed processes, and reward models.

Start from `RewardPool` (`pool.py`: processes with time limits), `verifiers.py` (the kinds that
ship), `code.py` and `jail.py` (programs, and what confines them) and `model.py` (what a reward
model must be).
"""

from hybridrl.rewards.pool import RewardPool
from hybridrl.rewards.results import RewardInput, RewardResult
from hybridrl.rewards.validate import validate_reward

__all__ = ["RewardInput", "RewardPool", "RewardResult", "validate_reward"]
