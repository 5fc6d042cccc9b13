"""`hybridrl plan auto`, `layout` and `memory`: plans of a config, without a process of its run.

Start from `run` in `mapping_command.py` (`hybridrl plan auto`) and in `memory_command.py` (the
other two). The search itself is in `hybridrl/planner`.
"""
