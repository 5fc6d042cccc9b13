"""Errors while Ray starts, and of jobs."""


class RayStartError(RuntimeError):
    """Ray did not start on this machine, or on one of a job's nodes."""


class JobError(RuntimeError):
    """Slurm, or the job service of a Ray cluster, refused or does not know a job."""
