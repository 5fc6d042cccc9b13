"""Runs as jobs of Slurm or of a standing Ray cluster, above the driver.

Start from `commands.py` (`hybridrl submit`, `status`, `logs`, `cancel`), `BatchScript`
(`batch.py`: the script that Slurm gets) and `RayJob` (`ray_jobs.py`: the same by Ray's service).
"""
