"""A jail for programs that a model has written: no network, a read-only root, limits.

`run` is one call; `Jail` runs one program on several inputs. `choose` tries what works here:
bubblewrap, then namespaces of the kernel. `jail_child.py` is the process inside.
"""

import functools
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from hybridrl.config import ConfigError, JailKind, JailLimits

START_TIMEOUT_S = 20.0
"""Seconds for a jail to stand, and beyond a limit of time for it to answer."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",  # numpy would start a thread a core
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # the same reward for the same program
}
CHILD = str(Path(__file__).with_name("jail_child.py"))


class JailError(RuntimeError):
    """A jail that does not stand, or that ended before its answer."""


@dataclass(frozen=True, slots=True)
class JailResult:
    """What a program did. `error`: it raised, or ended with another exit code than 0.

    `timeout` and `output`: it went beyond `seconds` or `output_kb`, and was killed. The texts are
    what it wrote until then, stderr its last 2,000 characters. `value` is what a function returned,
    as JSON has it: lists for tuples. Anything here may be what a hostile program wants it to be.
    """

    status: Literal["ok", "error", "timeout", "output"]
    stdout: str = ""
    stderr: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class Mechanism:
    """How programs are confined on this machine, as a trial has shown it."""

    kind: JailKind
    protections: tuple[str, ...] = ()
    """What the kernel has besides: Landlock, seccomp."""

    def __str__(self) -> str:
        if self.kind is JailKind.off:
            return "no jail: limits alone"
        return ", ".join([self.kind.value, *self.protections])


def run(
    program: str,
    stdin: str = "",
    limits: JailLimits | None = None,
    kind: JailKind | None = None,
) -> JailResult:
    """Run a Python program once in a separate jail.

    Without `limits` and `kind`, those of the run's `reward.limits` and `reward.jail`. Raises
    ConfigError where no jail works, and JailError where one breaks.
    """
    with Jail(program, limits, kind) as jail:
        return jail.run(stdin)


@dataclass(slots=True)
class _Defaults:
    kind: JailKind = JailKind.auto
    limits: JailLimits = field(default_factory=JailLimits)


_defaults = _Defaults()


def configure(kind: JailKind, limits: JailLimits) -> None:
    """Set what `run` and `Jail` take in this process where a call says nothing."""
    _defaults.kind, _defaults.limits = kind, limits


def configured() -> Mechanism:
    """What confines the programs of this process. Raises ConfigError where nothing does."""
    return choose(_defaults.kind)


class Jail:
    """A process, confined, that runs one program as often as asked, each time anew.

    Files in /tmp stay from one run of the program to the next; processes do not. It ends with the
    thread that has opened it.
    """

    def __init__(
        self, program: str, limits: JailLimits | None = None, kind: JailKind | None = None
    ) -> None:
        """Start it; without `kind` and `limits`, those of the run, as in `run`."""
        limits, kind = limits or _defaults.limits, kind or _defaults.kind
        if kind is JailKind.auto:
            kind = choose(kind).kind
        self._limits, self._pending, self._directory = limits, b"", ""
        if kind is JailKind.off:
            self._directory = tempfile.mkdtemp(prefix="hybridrl-jail-")
        # At most six bytes of JSON for each of the program's, in three texts.
        self._longest = 3 * 6 * (limits.output_kb * 1024 + 65536) + 65536
        self._process = subprocess.Popen(
            _command(kind, limits),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT,
            cwd=self._directory or "/",
            start_new_session=True,  # a group to kill
            bufsize=0,
        )
        try:
            self._send({"program": program})
            self.protections = tuple(self._receive(START_TIMEOUT_S)["protections"])
        except BaseException:
            self.close()
            raise

    def run(self, stdin: str = "", seconds: float | None = None) -> JailResult:
        """Run the program with `stdin`, for at most `seconds` (that of the limits)."""
        return self._run({"stdin": stdin}, seconds)

    def run_program(self, program: str, stdin: str = "") -> JailResult:
        """Run another program, once; files in /tmp stay from those before it."""
        return self._run({"program": program, "stdin": stdin}, None)

    def call(
        self, function: str, arguments: Sequence[Any], seconds: float | None = None
    ) -> JailResult:
        """Run the program, then its function, or the method of its class `Solution`."""
        return self._run({"function": function, "arguments": list(arguments)}, seconds)

    def check(self, tests: str, seconds: float | None = None) -> JailResult:
        """Run the program, then the source `tests` in its namespace; `error` unless all pass."""
        return self._run({}, seconds, tests)

    def _run(self, request: dict[str, Any], seconds: float | None, check: str = "") -> JailResult:
        seconds = self._limits.seconds if seconds is None else seconds
        empty = {"stdin": "", "function": "", "arguments": [], "check": bool(check)}
        self._send({**empty, **request, "seconds": seconds})
        answer = self._receive(seconds + START_TIMEOUT_S)
        token = secrets.token_hex(8)
        if "ready" in answer:
            self._send({"check": check, "token": token})
            answer = self._receive(seconds + START_TIMEOUT_S)
        status, report, value = answer["status"], answer["report"], None
        if status == "ok" and check and report != f"ready\n{token}":
            status = "error"  # it ended before its tests did
        if status == "ok" and "function" in request:
            try:
                (value,) = json.loads(report)
            except (ValueError, TypeError):
                status = "error"
        return JailResult(status, answer["stdout"], answer["stderr"], value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the jail and wait for it. May be called twice."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._process.stdin.close()  # it ends by itself, and leaves no zombie to another
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._process.stderr.close()
        if self._directory:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _send(self, value: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        data = memoryview(json.dumps(value).encode() + b"\n")
        try:
            while data:
                data = data[self._process.stdin.write(data) :]
        except OSError:
            raise self._broken() from None

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The next line, within `seconds` and `_longest` bytes; raises JailError."""
        assert self._process.stdout is not None
        stream, deadline = self._process.stdout.fileno(), time.monotonic() + seconds
        while b"\n" not in self._pending:
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([stream], [], [], left)
            data = os.read(stream, 1 << 20) if ready else b""
            self._pending += data
            if not data or len(self._pending) > self._longest:
                raise self._broken()
        line, _, self._pending = self._pending.partition(b"\n")
        try:
            answer = json.loads(line)
        except ValueError:
            raise self._broken() from None
        if not isinstance(answer, dict):
            raise self._broken()
        return answer

    def _broken(self) -> JailError:
        """The reason, in one line, of a jail that does not answer."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        assert self._process.stderr is not None
        lines = self._process.stderr.read().decode(errors="replace").strip().splitlines()
        return JailError(lines[-1] if lines else "the jail ended without an answer")


def _command(kind: JailKind, limits: JailLimits) -> list[str]:
    """The command of a jail's first process."""
    readable, links, packages = _readable()
    # Root's processes have no limit on their number, so root's programs run as a user of no one.
    uid = 2**30 + secrets.randbits(28) if os.geteuid() == 0 and kind is not JailKind.off else None
    spec = {
        "mechanism": kind.value,
        "parent": os.getpid(),
        "uid": uid,
        "readable": readable,
        "links": links,
        "packages": packages,
        "devices": DEVICES,
        "limits": {
            "memory": limits.memory_mb << 20,
            "disk": limits.disk_mb << 20,
            "output": limits.output_kb << 10,
            "processes": limits.processes,
            "open_files": limits.open_files,
        },
    }
    python = [_interpreter(), "-S", "-s", "-P", "-B", "-X", "utf8"]
    if kind is not JailKind.bubblewrap:
        return [*python, CHILD, json.dumps(spec)]
    command = [
        shutil.which("bwrap") or "bwrap",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
    ]
    command += ["--unshare-cgroup-try", "--die-with-parent", "--as-pid-1"]
    if uid is None:
        command += ["--unshare-user"]
    else:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += ["--perms", "1777", "--size", str(limits.disk_mb << 20), "--tmpfs", "/tmp"]
    parents = {str(parent) for path in (*readable, *DEVICES) for parent in Path(path).parents}
    for path in sorted(parents - {"/", "/tmp"}):  # else some are for root alone
        command += ["--perms", "0755", "--dir", path]
    for path in readable:
        command += ["--ro-bind", path, path]
    for path in DEVICES:
        command += ["--dev-bind", path, path]
    for link, target in links.items():
        command += ["--symlink", target, link]
    command += ["--ro-bind", CHILD, "/jail_child.py", "--remount-ro", "/", "--chdir", "/tmp"]
    return [*command, "--", *python, "/jail_child.py", json.dumps(spec)]


def _interpreter() -> str:
    """The interpreter outside of a virtual environment, at its real path."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def _readable() -> tuple[list[str], dict[str, str], list[str]]:
    """Paths that a jail shows, links among them, and where Python finds installed packages."""
    packages = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    packages = list(dict.fromkeys(os.path.realpath(path) for path in packages))
    prefix = os.path.realpath(sys.base_prefix)
    paths = [*packages, _interpreter()]  # no more of /usr/local, say, than Python needs
    links = {}
    own = [f"{prefix}/lib", f"{prefix}/lib64"]
    for path in (*own, "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"):
        if os.path.islink(path):
            links[path] = os.readlink(path)
        elif os.path.exists(path):
            paths.append(path)
    outermost = [
        path
        for path in dict.fromkeys(paths)
        if not any(path != other and Path(path).is_relative_to(other) for other in paths)
    ]
    return outermost, links, packages


@functools.cache
def choose(kind: JailKind) -> Mechanism:
    """The first mechanism of `kind` that confines a program on this machine, as a trial shows.

    Raises ConfigError where none does.
    """
    if kind is JailKind.off:
        return Mechanism(kind)
    wanted = [JailKind.bubblewrap, JailKind.namespaces] if kind is JailKind.auto else [kind]
    obstacles = []
    for candidate in wanted:
        mechanism = try_mechanism(candidate)
        if isinstance(mechanism, Mechanism):
            return mechanism
        obstacles.append(f"{candidate.value}: {mechanism}")
    allowed = f"off, or a machine on which a jail works ({'; '.join(obstacles)})"
    raise ConfigError("reward.jail", kind.value, allowed)


TRIAL = """
import os, socket
secret, port = input(), int(input())
try:
    socket.create_connection(("127.0.0.1", port), 0.2)
    print("reaches the network")
except OSError:
    pass
if os.path.exists(secret) or os.path.exists("/proc/1"):
    print("reads files of the host")
for path in ("/", os.path.dirname(os.__file__)):
    try:
        open(os.path.join(path, "hybridrl-trial"), "w").close()
        print("writes", path)
    except OSError:
        pass
open("/tmp/trial", "w").write("room of its own")
if os.getuid() == 0:
    print("is root")
print("done")
"""


def try_mechanism(kind: JailKind) -> Mechanism | str:
    """Run a program under `kind` that tries to get out: the mechanism, or why it does not work."""
    if kind is JailKind.bubblewrap and shutil.which("bwrap") is None:
        return "bwrap is not installed"
    limits = JailLimits(seconds=5.0)
    with tempfile.NamedTemporaryFile() as secret, socket.create_server(("127.0.0.1", 0)) as server:
        try:
            with Jail(TRIAL, limits, kind) as jail:
                result = jail.run(f"{secret.name}\n{server.getsockname()[1]}\n")
        except (JailError, OSError) as error:
            return str(error)
    if result.stdout != "done\n":
        lines = (result.stdout + result.stderr).strip().splitlines() or [result.status]
        return f"a program in it {lines[-1] if result.status != 'ok' else lines[0]}"
    return Mechanism(kind, jail.protections)
