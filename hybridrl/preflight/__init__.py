"""Every check before a run starts a process: models, data, judges, environments, memory.

Start from `prepare` (`prepare.py`: all checks, and what they make for the run), `plan_run`
(`memory_plan.py`: bytes on each rank) and `scope_of` (`placement.py`: which ranks a stage uses).
"""
