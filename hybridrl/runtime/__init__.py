"""Processes of a run, below the driver: launchers, Ray clusters, Slurm nodes, cleanup.

Start from `launched` (`launchers.py`: the launcher of a config), `Launcher` (`launcher.py`: the
interface) and `ray_runtime` (`ray_cluster.py`: Ray, local, joined, or over the nodes of a Slurm
job). `ray_cleanup.py` ends leftover processes.
"""
