"""`hybridrl plan auto`, `schedule`, `layout` and `memory`: plans without a process of a run.

Start from `run` in `mapping_command.py` (`hybridrl plan auto`), in `schedule_command.py` (`hybridrl
plan schedule`) and in `memory_command.py` (the other two). `MappingSearch` (`mapping_search.py`)
searches, `SimulatedExecutor` (`simulate.py`) is the executor in virtual time, and seconds and bytes
are those of `hybridrl/costs`.
"""
