"""Forward passes inside an instance: start from `ScoreEngine` in `engine.py`."""
