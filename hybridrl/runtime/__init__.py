"""Processes: how ranks are started, found, called and ended, below the controller.

Start from `launched` (`launchers.py`: the launcher that a config asks for), `Launcher`
(`launcher.py`: the interface) and `ray_runtime` (`ray_cluster.py`: Ray, local, joined, or over the
nodes of a Slurm job). What a run leaves behind is cleaned up in `ray_cleanup.py`.
"""
