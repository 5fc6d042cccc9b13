"""`hybridrl submit | status | logs | cancel`: a run as a job of Slurm, or of a Ray cluster.

Each yields lines to print.
"""

import contextlib
import json
import logging
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hybridrl.config import Config, ConfigError, RayClusterConfig, SlurmClusterConfig, compose
from hybridrl.jobs import containers, ray_jobs
from hybridrl.jobs.batch import BatchScript
from hybridrl.jobs.ray_jobs import RayJob
from hybridrl.runtime import slurm
from hybridrl.runtime.errors import JobError
from hybridrl.system.activity import FOLDER
from hybridrl.system.owned_folder import temporary_folder
from hybridrl.system.rank_looks import look, recorded_ranks
from hybridrl.telemetry.log import command_log

logger = logging.getLogger(__name__)

SUBMIT_USAGE = """usage: hybridrl submit [--dry-run] cluster=slurm cluster.gpus_per_node=N ...
       hybridrl submit -m ... KEY=A,B        a sweep, as one job array
       hybridrl submit cluster=ray cluster.address=http://HEAD:8265 ...

Checks what hybridrl train would run, writes RUN/slurm/job.sh, and gives it to sbatch; or gives the
run to the job service of a standing Ray cluster. --dry-run prints the script, or the command, and
does nothing. docs/clusters.md has the keys.
"""
_JOB = re.compile(r"\d+(_\d+)?")
_POLL_S = 0.5
_ASK_S = 2.0  # Slurm's controller has others to answer
_LIVE = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STOPPED")


def submit(args: Sequence[str]) -> Iterator[str]:
    """Check a run or a sweep, write its batch script and submit it; the last line is JSON.

    Raises ConfigError for settings that cannot work, with nothing submitted and no directory left.
    """
    if {"-h", "--help"} & set(args):
        yield SUBMIT_USAGE.rstrip()
        return
    requested = [arg for arg in args if arg != "--dry-run"]
    batch, configs = _plan(requested)
    with command_log(configs[0].log.level):
        yield from _check_and_submit(batch, configs, dry_run=len(requested) < len(args))


def _check_and_submit(
    batch: BatchScript, configs: Sequence[Config], dry_run: bool
) -> Iterator[str]:
    from hybridrl.driver.dry_run import check_runs  # seconds

    _check_free(batch)
    check_runs(configs, batch.run_dirs)
    on_ray = isinstance(batch.cluster, RayClusterConfig)
    if dry_run:
        yield ray_jobs.entrypoint(batch) if on_ray else batch.text().rstrip()
        return
    if on_ray:
        yield from _submit_to_ray(batch)
        return
    job = _submit(batch)
    tasks = range(len(batch.tasks)) if batch.sweep else (0,)
    yield f"submitted job {job}: {batch.script}"
    yield from (f"log  {batch.log(job, task)}" for task in tasks)
    yield f"to follow it: hybridrl logs -f {shlex.quote(_shown(batch.run_dirs[0]))}"
    record = {
        "job": job,
        "run": str(batch.directory),
        "logs": [str(batch.log(job, t)) for t in tasks],
    }
    yield json.dumps(record)


def _plan(args: Sequence[str]) -> tuple[BatchScript, list[Config]]:
    """The batch of a command line, and the config of each of its runs."""
    # the settings, and what cannot be submitted
    compose.register()
    composed = compose.parse_arguments(compose.resolve_arguments(args))
    options = compose.parse_arguments(args)
    if options.cfg or options.info or options.hydra_help or options.run:
        raise ConfigError("option", " ".join(args), "-m, --config-dir, --dry-run; overrides")
    sweep = bool(options.multirun)
    config = compose.check(composed.overrides, composed.config_dir, sweep)
    cluster = config.cluster
    if isinstance(cluster, SlurmClusterConfig):
        containers.check_image(cluster)
    elif not isinstance(cluster, RayClusterConfig):
        raise ConfigError("cluster", cluster.kind.value, "slurm or ray, to submit a run")
    elif sweep:
        raise ConfigError("option", "-m", "a single run with cluster=ray")
    # the directory
    path = Path(config.run.dir).absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError("run.dir", config.run.dir, "a directory, or nothing that is there")
    is_resumed = any(override.startswith("trainer.resume=") for override in options.overrides)
    if path.exists() and any(path.iterdir()) and not (is_resumed and config.trainer.resumes):
        raise ConfigError("run.dir", config.run.dir, "a directory that is not there yet, or empty")
    # overrides that all tasks share, and those that are swept
    configs = [compose.check(o, composed.config_dir) for o in compose.choices(composed.overrides)]
    fixed, swept = [], []
    for override in options.overrides:
        key, _, value = override.lstrip("+").partition("=")
        values = compose.choices([override])
        if len(values) > 1 and (key == "run.dir" or key.partition(".")[0] == "cluster"):
            raise ConfigError(key, value, "one value: the runs of a sweep are tasks of one job")
        if key != "run.dir":
            (fixed.append(values[0][0]) if len(values) == 1 else swept.append(override))
    if options.config_dir is not None:
        fixed.insert(0, f"--config-dir={options.config_dir}")
    tasks = tuple(tuple(task) for task in compose.choices(swept))
    return BatchScript(cluster, path, Path.cwd(), tuple(fixed), tasks, sweep), configs


def _check_free(batch: BatchScript) -> None:
    """Raise ConfigError if a job of the run has not ended: two would write its records.

    One that waits for it (`--dependency`) may be submitted.
    """
    options = batch.cluster.sbatch if isinstance(batch.cluster, SlurmClusterConfig) else ()
    if any(option.startswith(("--dependency", "-d")) for option in options):
        return
    job = ""
    if RayJob.is_of(batch.directory):
        ray_job = RayJob(batch.directory)
        job = ray_job.id if ray_job.lives() else ""
    elif (batch.directory / "slurm/job").is_file():
        job = _job_of(batch.directory)
        job = job if _lives(job) else ""
    if job:
        allowed = f"a directory whose job has ended; {job} has not"
        raise ConfigError("run.dir", _shown(batch.directory), allowed)


def _submit_to_ray(batch: BatchScript) -> Iterator[str]:
    new = [path for path in (batch.directory, *batch.directory.parents) if not path.exists()]
    try:
        job = ray_jobs.submit(batch)
    except (ConfigError, JobError):
        if new:
            shutil.rmtree(new[-1], ignore_errors=True)
        raise
    yield f"submitted job {job} to {batch.cluster.address}"
    yield f"to follow it: hybridrl logs -f {shlex.quote(_shown(batch.directory))}"
    yield json.dumps({"job": job, "run": str(batch.directory), "logs": []})


def _submit(batch: BatchScript) -> str:
    """Write the script and submit it to sbatch; the job's id. Leaves no files if it is refused."""
    slurm.check_partition(batch.slurm)
    folders = (batch.script.parent, *batch.script.parent.parents)
    new = [path for path in folders if not path.exists()]
    before = batch.script.read_text() if batch.script.is_file() else None
    try:
        for run_dir in (batch.directory, *batch.run_dirs):
            (run_dir / "slurm").mkdir(parents=True, exist_ok=True)
        batch.script.write_text(batch.text())
        batch.script.chmod(0o755)
        job = _sbatch(batch)
    except OSError as error:
        allowed = f"a writable directory ({error.strerror})"
        raise ConfigError("run.dir", batch.directory, allowed) from error
    except (JobError, ConfigError):
        if new:
            shutil.rmtree(new[-1], ignore_errors=True)
        elif before is not None:
            batch.script.write_text(before)
        raise
    (batch.directory / "slurm" / "job").write_text(f"{job}\n")
    if batch.sweep:
        for number, run_dir in enumerate(batch.run_dirs):
            (run_dir / "slurm" / "job").write_text(f"{job}_{number}\n")
    return job


def _sbatch(batch: BatchScript) -> str:
    """Submit the written script; the job's id."""
    logger.debug("submitting %s", batch.script)
    job = slurm.call("sbatch", "--parsable", str(batch.script)).strip().partition(";")[0]
    logger.debug("job %s is submitted", job)
    return job


def _scancel(job: str) -> None:
    logger.debug("cancelling job %s", job)
    slurm.call("scancel", job)


def examine_nodes(
    cluster: SlurmClusterConfig, directory: Path, args: Sequence[str]
) -> tuple[str, int]:
    """Run `hybridrl doctor ARGS` as a job and wait: its output and its exit code.

    Its script and its log are below `directory` meanwhile. Raises SlurmError if it is refused.
    """
    containers.check_image(cluster)
    slurm.check_partition(cluster)
    with temporary_folder(directory, ".doctor") as folder:
        batch = BatchScript(cluster, folder, Path.cwd(), tuple(args), command="doctor")
        batch.script.parent.mkdir()
        batch.script.write_text(batch.text())
        job = _sbatch(batch)
        try:
            while _lives(job):
                time.sleep(_POLL_S)
        except BaseException:
            _scancel(job)
            raise
        (entry,) = slurm.jobs(job)
        log = batch.log(job)
        text = log.read_text() if log.is_file() else f"{_state(job, folder)}\n"
        return text, int(entry["ExitCode"].partition(":")[0])


def status(args: Sequence[str]) -> Iterator[str]:
    """Job, state and directory of the runs named by directory or job id; default: all in ./runs.

    A sweep's directory stands for all of its runs. Of a run with ranks on this node, what each is
    in and where its code stands.
    """
    runs = Path("runs")
    records = [*runs.glob("*/slurm/job"), *runs.glob("*/ray/job.json")]
    records += [file for file in runs.glob(f"*/{FOLDER}/00000") if _live_ranks(file.parents[1])]
    targets = list(args) or sorted({str(file.parents[1]) for file in records})
    if not targets:
        yield "no submitted run in ./runs; name a run directory or a job id"
    for target in targets:
        path = Path(target)
        if RayJob.is_of(path):
            yield _ray_status(path)
        elif (path / "run.json").is_file() and not (path / "slurm/job").is_file():
            yield f"{_record(path).get('state', 'unknown')}  {_shown(path)}"
        else:
            for job, run_dir in _runs(target):
                yield f"{job}  {_state(job, run_dir)}  {_shown(run_dir)}"
                yield from map(str, look(run_dir, _live_ranks(run_dir)))
            continue
        yield from map(str, look(path, _live_ranks(path)))


def logs(args: Sequence[str]) -> Iterator[str]:
    """The output of a run; with `-f`, until it ends."""
    follow = "-f" in args
    targets = [arg for arg in args if arg != "-f"]
    if len(targets) != 1:
        raise ConfigError("logs", " ".join(args), "[-f] and one run directory or job id")
    if RayJob.is_of(Path(targets[0])):
        yield from RayJob(Path(targets[0])).lines(follow)
        return
    job, run_dir = _runs(targets[0])[0]
    file = run_dir / "slurm" / f"{job}.out"
    if not follow and not file.is_file():
        yield f"job {job} has printed nothing: {_state(job, run_dir)}"
        return
    yield from _lines(file, job, follow)


def cancel(args: Sequence[str]) -> Iterator[str]:
    """End jobs named by run directory or job id, a sweep's directory with all of its runs."""
    if not args:
        raise ConfigError("cancel", "", "run directories or job ids")
    for target in args:
        if RayJob.is_of(Path(target)):
            ray_job = RayJob(Path(target))
            lives = ray_job.lives()
            ray_job.stop()
            yield f"cancelled job {ray_job.id}" if lives else f"job {ray_job.id} has ended before"
            continue
        job = target if _JOB.fullmatch(target) else _job_of(Path(target))
        if job == target and not slurm.jobs(job):
            raise ConfigError("job", job, "a job that Slurm knows")
        if _lives(job):
            _scancel(job)
            yield f"cancelled job {job}"
        else:
            yield f"job {job} has ended before"


def _live_ranks(run_dir: Path) -> list[int]:
    """The ranks of a run that have a process on this node."""
    return [one.rank for one in look(run_dir, recorded_ranks(run_dir), stacks=False)]


def _ray_status(run_dir: Path) -> str:
    try:
        ray_job = RayJob(run_dir)
        return f"{ray_job.id}  {ray_job.state()}  {_shown(run_dir)}"
    except (JobError, ConfigError) as error:  # the cluster is gone, or has forgotten it
        record = _record(run_dir)
        return f"{record.get('state', 'unknown')}  {_shown(run_dir)}  ({error})"


def _runs(target: str) -> list[tuple[str, Path]]:
    """Job and directory of every run that `target` names."""
    if _JOB.fullmatch(target):
        entries = slurm.jobs(target)
        if not entries:
            allowed = "a job that Slurm still knows; name its run directory"
            raise ConfigError("job", target, allowed)
        return [(job["id"], _run_dir(job)) for job in entries]
    path = Path(target)
    job = _job_of(path)
    tasks = sorted(path.glob("*/slurm/job"), key=lambda file: int(file.parents[1].name))
    return [(_job_of(file.parents[1]), file.parents[1]) for file in tasks] or [(job, path)]


def _run_dir(job: dict[str, str]) -> Path:
    """The directory of a job's run, or of its sweep if tasks wait together, from its script's path.

    Raises ConfigError for a job that `hybridrl submit` has not made.
    """
    script = Path(job["Command"])
    if script.parts[-2:] != ("slurm", "job.sh"):
        raise ConfigError("job", job["id"], "a job of hybridrl submit, or a run directory")
    task = job.get("ArrayTaskId", "")
    return script.parents[1] / task if task.isdigit() else script.parents[1]


def _job_of(run_dir: Path) -> str:
    with contextlib.suppress(OSError):
        if job := (run_dir / "slurm" / "job").read_text().strip():
            return job
    allowed = "a directory of hybridrl submit, or a job id"
    raise ConfigError("run", run_dir, allowed)


def _record(run_dir: Path) -> dict[str, Any]:
    """The run's own record; empty before there is one."""
    try:
        record: dict[str, Any] = json.loads((run_dir / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    return record


def _state(job: str, run_dir: Path) -> str:
    """Slurm's state of a job, or the run's own record if Slurm has forgotten the job."""
    record, known = _record(run_dir), slurm.jobs(job)
    if not known:
        return " ".join((str(record.get("state", "ended")), str(record.get("reason", "")))).strip()
    entry = known[0]
    state = entry["JobState"]
    if state == "PENDING":
        return f"{state} ({entry['Reason']})"
    if state == "RUNNING":
        return f"{state} {entry['RunTime']} on {entry['NodeList']}"
    code, _, number = entry["ExitCode"].partition(":")
    how = f"exit {code}" if number == "0" else f"signal {number}"
    return f"{state} ({how}) {record.get('reason', '')}".strip()


def _lines(file: Path, job: str, follow: bool) -> Iterator[str]:
    """The lines of a file that a job writes, until its end or, with `follow`, the job's."""
    while follow and not file.is_file() and _lives(job):
        time.sleep(_POLL_S)
    if not file.is_file():
        raise slurm.SlurmError(f"job {job} has ended and has printed nothing")
    with file.open(errors="replace") as opened:
        line_so_far, asked, last = "", 0.0, not follow
        while True:
            if follow and time.monotonic() - asked > _ASK_S:
                last, asked = not _lives(job), time.monotonic()
            for line in opened:  # after the check: to the file's end
                line_so_far += line
                if line_so_far.endswith("\n"):
                    yield line_so_far.rstrip("\n")
                    line_so_far = ""
            if last:
                if line_so_far:
                    yield line_so_far
                return
            time.sleep(_POLL_S)


def _lives(job: str) -> bool:
    return any(entry["JobState"] in _LIVE for entry in slurm.jobs(job))


def _shown(path: Path) -> str:
    """The path, relative to the working directory if it is inside."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
