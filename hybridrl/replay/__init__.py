"""A step of a run again, and where two runs first differ.

Start from `replay` (`step.py`) and `blame` (`blame.py`); `commands.py` reads their arguments.
"""
