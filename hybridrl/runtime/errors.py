"""Errors while Ray starts, and of jobs."""


class RayStartError(RuntimeError):
    """Ray, or a rank on it, did not start on this machine, or on one of a job's nodes.

    `died` says that another start may succeed, since what it lacked has ended or did not answer.
    """

    def __init__(self, message: str, died: bool = True) -> None:
        super().__init__(message)
        self.died = died


class JobError(RuntimeError):
    """Slurm, or the job service of a Ray cluster, refused or does not know a job."""
