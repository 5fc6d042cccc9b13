"""Verifiers of responses, in sandboxed processes."""

from hybridrl.rewards.pool import RewardPool, RewardResult, validate_reward
from hybridrl.rewards.verifiers import RewardInput

__all__ = ["RewardInput", "RewardPool", "RewardResult", "validate_reward"]
