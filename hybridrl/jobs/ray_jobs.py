"""A run as a job of a standing Ray cluster, through the job service of its dashboard.

RUN/ray/job.json holds a run's cluster and job.
"""

import asyncio
import json
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.jobs.batch import BatchScript
from hybridrl.runtime.errors import JobError
from hybridrl.runtime.ray_cluster import show_token
from hybridrl.telemetry.records import write_json

logger = logging.getLogger(__name__)

_STOP_S = "20"  # a run ends in a few seconds; Ray gives a job three by default
_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class RayJobError(JobError):
    """The job service refused, or has forgotten the job."""


def entrypoint(batch: BatchScript) -> str:
    """The command for the cluster's head: the driver, in the directory of `hybridrl submit`."""
    python = shlex.quote(batch.cluster.python or sys.executable)
    command = f"exec {python} -P -m hybridrl.cli {batch.command}"
    options = shlex.join([*batch.options, *batch.targets()])
    return f"cd {shlex.quote(str(batch.work_dir))} && {command} {options}"


def submit(batch: BatchScript) -> str:
    """Submit the run to the cluster; the job's id. Raises ConfigError if there is no cluster."""
    logger.debug("submitting %s to %s", batch.directory, batch.cluster.address)
    client = _client(str(batch.cluster.address))
    folder = batch.directory / "ray"
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": _STOP_S}
    if path := os.environ.get("PYTHONPATH"):
        variables["PYTHONPATH"] = path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        job: str = client.submit_job(
            entrypoint=entrypoint(batch), runtime_env={"env_vars": variables}
        )
    except RuntimeError as error:
        raise RayJobError(f"the cluster at {batch.cluster.address}: {_line(error)}") from error
    except OSError as error:
        allowed = f"a writable directory ({error.strerror})"
        raise ConfigError("run.dir", batch.directory, allowed) from error
    logger.debug("job %s is submitted", job)
    write_json(folder / "job.json", {"address": batch.cluster.address, "job": job})
    return job


class RayJob:
    """A submitted run's job."""

    def __init__(self, run_dir: Path) -> None:
        try:
            record = json.loads((run_dir / "ray/job.json").read_text())
            self.address, self.id = str(record["address"]), str(record["job"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError("run", run_dir, "a directory with a whole ray/job.json") from None
        self._client = _client(self.address)

    @staticmethod
    def is_of(run_dir: Path) -> bool:
        """Whether a directory is that of a run which was submitted to a Ray cluster."""
        return (run_dir / "ray/job.json").is_file()

    def state(self) -> str:
        """PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED, with the exit code of a failed job."""
        info = self._info()
        code = info.driver_exit_code
        return f"{info.status.value} (exit {code})" if code is not None else str(info.status.value)

    def lives(self) -> bool:
        """Whether it has not ended."""
        return self._info().status.value not in _ENDED

    def lines(self, follow: bool) -> Iterator[str]:
        """The lines of its output; with `follow`, until it ends."""
        self._info()  # raises if the cluster has forgotten the job
        if not follow:
            yield from self._client.get_job_logs(self.id).splitlines()
            return
        loop, line_so_far = asyncio.new_event_loop(), ""
        try:
            chunks = self._client.tail_job_logs(self.id)
            while (chunk := loop.run_until_complete(anext(chunks, None))) is not None:
                *complete, line_so_far = (line_so_far + chunk).split("\n")
                yield from complete
        finally:
            loop.close()
        if line_so_far:
            yield line_so_far

    def stop(self) -> None:
        """Send SIGTERM, as Slurm would: the run ends, and records `interrupted`."""
        logger.debug("stopping job %s at %s", self.id, self.address)
        self._client.stop_job(self.id)

    def _info(self) -> Any:
        try:
            return self._client.get_job_info(self.id)
        except RuntimeError as error:
            message = f"the cluster at {self.address} does not know job {self.id}: {_line(error)}"
            raise RayJobError(message) from error


def _client(address: str) -> Any:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        try:
            return JobSubmissionClient(address)
        except AuthenticationError:
            show_token()
            return JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        allowed = f"the dashboard of a Ray cluster ({_line(error)})"
        raise ConfigError("cluster.address", address, allowed) from error


def _line(error: Exception) -> str:
    """The first line of Ray's message."""
    return str(error).strip().splitlines()[0].strip()
