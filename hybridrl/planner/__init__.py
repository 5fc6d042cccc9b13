"""Simulated schedules and costs of a run on other machines. Imports neither torch nor ray.

Start from `report` (`layout.py`: bytes of a weight switch), `SimulatedExecutor` (`simulate.py`: the
executor in virtual time) and `run` (`command.py`: `hybridrl plan schedule`).
"""
