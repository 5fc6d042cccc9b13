"""What a run would do and cost on machines that are not here. Imports neither torch nor ray.

Start from `report` (`layout.py`: bytes of a weight switch), `SimulatedExecutor` (`simulate.py`: the
executor in virtual time) and `run` (`command.py`: `hybridrl plan schedule`).
"""
