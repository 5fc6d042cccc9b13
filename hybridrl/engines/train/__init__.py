"""Training on one rank: start from `TrainEngine` in `engine.py`."""
