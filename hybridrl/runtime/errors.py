"""What goes wrong while machines come up, and with jobs on them."""


class RayStartError(RuntimeError):
    """Ray did not come up on this machine, or on one of a job's nodes."""


class JobError(RuntimeError):
    """Slurm, or the job service of a Ray cluster, refused or does not know a job."""
