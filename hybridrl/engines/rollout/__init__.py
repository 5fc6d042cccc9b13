"""Generation on one rank: start from `RolloutEngine` in `interface.py`."""
