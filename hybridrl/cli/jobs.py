"""`hybridrl submit`, `status`, `logs` and `cancel`: runs as jobs of Slurm or of Ray."""

import os
import sys

from hybridrl.cli.output import USAGE, fail


def job_command(command: str, args: list[str]) -> None:
    """Run one of submit, status, logs and cancel."""
    from hybridrl.jobs import commands
    from hybridrl.runtime.errors import JobError

    if command != "submit" and {"-h", "--help"} & set(args):
        print(USAGE)
        return
    of_jobs = {
        "submit": commands.submit,
        "status": commands.status,
        "logs": commands.logs,
        "cancel": commands.cancel,
    }
    try:
        for line in of_jobs[command](args):
            print(line, flush=True)
    except JobError as error:
        fail(str(error), 1)
    except BrokenPipeError:  # the reader has closed the pipe: hybridrl logs RUN | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
