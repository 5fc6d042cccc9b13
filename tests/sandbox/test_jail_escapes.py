"""Twelve escapes from the jail, each a real program. Without a jail, those without harm succeed."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from hybridrl.config import JailKind, JailLimits, JudgeConfig, RewardKind
from hybridrl.rewards.code import judge_program
from hybridrl.sandbox.jail import Jail, JailResult, Mechanism, run, try_mechanism

SECRET = "KEY-4711-of-the-host"
LIMITS = JailLimits(seconds=5.0, memory_mb=192, processes=8, open_files=32, disk_mb=4, output_kb=64)
OUTCOMES = {kind: try_mechanism(kind) for kind in (JailKind.bubblewrap, JailKind.namespaces)}
JAILS = [
    pytest.param(
        kind,
        id=kind.value,
        marks=pytest.mark.skipif(not isinstance(outcome, Mechanism), reason=str(outcome)),
    )
    for kind, outcome in OUTCOMES.items()
]
OFF = pytest.param(JailKind.off, id="off")
"""The control: the program is one that does what the jail prevents."""
jailed = pytest.mark.parametrize("kind", JAILS)
with_control = pytest.mark.parametrize("kind", [OFF, *JAILS])


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Each test leaves no process of its jails."""
    yield
    deadline = time.monotonic() + 30
    while jail_processes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert jail_processes() == []


def jail_processes(parent: int | None = None) -> list[int]:
    """Processes of jails that `parent` (this one) has started; their command line names it."""
    mark = f'"parent": {parent or os.getpid()},'
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and any(mark in argument for argument in process.info["cmdline"] or [])
    ]


def limits(**changes: float) -> JailLimits:
    return JailLimits(**{name: getattr(LIMITS, name) for name in LIMITS.__slots__} | changes)


def escape(program: str, kind: JailKind, stdin: str = "", **changes: float) -> JailResult:
    return run(program, stdin, limits(**changes), kind)


# 1. socket


@with_control
def test_a_socket_reaches_no_one(kind: JailKind) -> None:
    program = (
        "import socket\n"
        "try:\n"
        "    with socket.create_connection(('127.0.0.1', int(input())), 1) as out:\n"
        "        out.sendall(b'out')\n"
        "    print('out')\n"
        "except OSError as error:\n"
        "    print(type(error).__name__)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        result = escape(program, kind, f"{server.getsockname()[1]}\n")
        if kind is JailKind.off:
            server.accept()[0].close()
            assert result.stdout == "out\n"
            return
        with pytest.raises(TimeoutError):
            server.accept()
    assert result.stdout.endswith("Error\n")


# 2. fork bomb


@jailed
def test_a_fork_bomb_has_few_processes_and_ends(kind: JailKind) -> None:
    count = (
        "import os, time\n"
        "number = 1\n"
        "try:\n"
        "    while os.fork():\n"
        "        number += 1\n"
        "    time.sleep(60)\n"
        "except OSError:\n"
        "    print(number)\n"
    )
    bomb = (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
    )
    with Jail(bomb, LIMITS, kind) as jail:
        assert jail.run(seconds=0.3).status == "timeout"
        assert len(jail_processes()) <= 3  # of the jail itself
        assert jail.run(seconds=0.3).status == "timeout"  # it stands
    assert escape(count, kind) == JailResult("ok", f"{LIMITS.processes}\n")


# 3. memory


@pytest.mark.parametrize(
    "take",
    [
        "taken = bytearray(512 << 20)",
        "import mmap\ntaken = mmap.mmap(-1, 512 << 20)",
        # Memory that is no one's address space.
        "import os\nfile = os.memfd_create('x')\nos.write(file, b'x')",
        "import ctypes\nassert ctypes.CDLL(None).shmget(0, 1 << 20, 0o1600) >= 0",
        "import ctypes\nassert ctypes.CDLL(None).msgget(0, 0o1600) >= 0",
    ],
    ids=["heap", "shared", "memfd", "shmget", "msgget"],
)
@jailed
def test_memory_ends_at_its_limit(kind: JailKind, take: str) -> None:
    result = escape(take, kind)
    assert result.status == "error"
    reasons = ("MemoryError", "Cannot allocate memory", "Operation not permitted", "AssertionError")
    assert any(reason in result.stderr for reason in reasons), result.stderr
    assert escape("taken = bytearray(64 << 20)", kind).status == "ok"


# 4. disk


@jailed
def test_the_disk_is_small_and_its_own(kind: JailKind) -> None:
    program = (
        "import os\n"
        "total, number = 0, 0\n"
        "try:\n"
        "    while total < 64 << 20:\n"
        "        number += 1\n"
        "        with open(f'/tmp/escaped-{number}', 'wb', 0) as file:\n"
        "            for _ in range(64):\n"
        "                total += file.write(bytes(1 << 14))\n"
        "except OSError as error:\n"
        "    print(total >> 20, error.strerror)\n"
        "try:\n"
        "    with open('/tmp/large', 'wb', 0) as file:\n"
        "        file.truncate(1 << 40)\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    result = escape(program, kind)
    assert result.stdout == "4 No space left on device\nFile too large\n"
    assert not list(Path("/tmp").glob("escaped-*"))


# 5. /proc of the parent


@with_control
def test_proc_tells_nothing_of_the_parent(kind: JailKind, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "ANSWER": SECRET}
    with subprocess.Popen(["sleep", "60"], env=environment) as host:
        program = (
            "import os\n"
            "host = input()\n"
            "for process in {host, '1', 'self', str(os.getppid())}:\n"
            "    for name in ('environ', 'maps', 'root/etc/passwd', 'cwd/.'):\n"
            "        try:\n"
            "            print(open(f'/proc/{process}/{name}').read())\n"
            "        except OSError:\n"
            "            pass\n"
        )
        result = escape(program, kind, f"{host.pid}\n", output_kb=1024)
        host.kill()
    assert result.status == "ok"
    assert (SECRET in result.stdout) == (kind is JailKind.off)
    assert kind is JailKind.off or result.stdout == ""


# 6. ptrace


@jailed
def test_no_process_can_be_traced(kind: JailKind) -> None:
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "attach, read = 16, 310\n"
        "for process in (1, int(input()), os.getppid()):\n"
        "    print(libc.ptrace(attach, process, 0, 0), end=' ')\n"
        "print(libc.ptrace(0, 0, 0, 0), libc.process_vm_readv(1, 0, 0, 0, 0, 0))\n"
    )
    result = escape(program, kind, f"{os.getpid()}\n")
    assert result.stdout == "-1 -1 -1 -1 -1\n"


# 7. symlinks


@with_control
def test_symlinks_lead_nowhere(kind: JailKind, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text(SECRET)
    target.chmod(0o666)
    program = (
        "import os\n"
        "target = input()\n"
        "for link in (target, '/' + '../' * 9 + target, os.path.dirname(target)):\n"
        "    for make in (os.symlink, os.link):\n"
        "        try:\n"
        "            make(link, 'link')\n"
        "            path = 'link' if link.endswith('target') else 'link/target'\n"
        "            print(open(path).read())\n"
        "            open(path, 'a').write('harm')\n"
        "        except OSError:\n"
        "            pass\n"
        "        if os.path.lexists('link'):\n"
        "            os.unlink('link')\n"
    )
    result = escape(program, kind, f"{target}\n")
    assert result.status == "ok"
    if kind is JailKind.off:
        assert SECRET in result.stdout
        assert target.read_text().startswith(SECRET + "harm")
    else:
        assert result.stdout == ""
        assert target.read_text() == SECRET


# 8. signals


@jailed
def test_signals_end_no_process_of_the_host(kind: JailKind) -> None:
    program = (
        "import os, signal\n"
        "for process in (int(input()), os.getppid(), 1, -1):\n"
        "    for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):\n"
        "        try:\n"
        "            os.kill(process, number)\n"
        "        except OSError:\n"
        "            pass\n"
        "print('done')\n"
    )
    with subprocess.Popen(["sleep", "60"]) as host:
        with Jail(program, LIMITS, kind) as jail:
            for _ in range(2):  # and its own root goes on
                assert jail.run(f"{host.pid}\n").stdout == "done\n"
        assert host.poll() is None
        assert psutil.Process(host.pid).status() == psutil.STATUS_SLEEPING
        host.kill()


# 9. reading the answer key


@with_control
def test_the_answer_key_is_out_of_reach(kind: JailKind, tmp_path: Path) -> None:
    key = tmp_path / "tests.jsonl"
    key.write_text(f'{{"answer": "{SECRET}"}}\n')
    program = (
        "import gc, os, re, sys\n"
        "texts, frame = [], sys._getframe()\n"
        "while frame:\n"
        "    texts.append(repr({**frame.f_locals, **frame.f_globals}))\n"
        "    frame = frame.f_back\n"
        "texts += [repr(thing)[:10000] for thing in gc.get_objects() if type(thing) is dict]\n"
        "texts += [repr(os.environ), repr(sys.argv), repr(getattr(sys, 'orig_argv', 0))]\n"
        "for file in range(3, 32):\n"
        "    try:\n"
        "        os.set_blocking(file, False)\n"
        "        texts.append(os.read(file, 1 << 20).decode())\n"
        "    except OSError:\n"
        "        pass\n"
        "try:\n"
        "    texts.append(open(input()).read())\n"
        "except OSError:\n"
        "    pass\n"
        "print(next(iter(re.findall(r'KEY-\\d+-of-the-host', ' '.join(texts))), 'nothing'))\n"
    )
    row = {"answer": {"inputs": [f"{key}\n"], "outputs": [f"{SECRET}\n"]}}
    config = JudgeConfig(kind=RewardKind.code, jail=kind, limits=LIMITS, timeout_s=10.0)
    assert judge_program(program, row, config) == float(kind is JailKind.off)
    row["answer"]["outputs"] = ["nothing\n"]
    assert judge_program(program, row, config) == float(kind is not JailKind.off)


# 10. writing the run directory


@with_control
def test_the_run_directory_is_out_of_reach(kind: JailKind, tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("1\n")
    metrics.chmod(0o666)
    tmp_path.chmod(0o777)
    program = (
        "import os, shutil, sys\n"
        "run = input()\n"
        "for attempt in (\n"
        "    lambda: open(f'{run}/metrics.jsonl', 'a').write('2'),\n"
        "    lambda: open(f'{run}/new', 'w').close(),\n"
        "    lambda: os.chmod(f'{run}/metrics.jsonl', 0),\n"
        "    lambda: open(os.path.dirname(os.__file__) + '/new.py', 'w').close()\n"
        "    if len(sys.argv) > 5 else os.mkdir('/new'),\n"
        "):\n"
        "    try:\n"
        "        attempt()\n"
        "        print('written')\n"
        "    except OSError:\n"
        "        pass\n"
    )
    if kind is JailKind.off:
        program = program.replace("os.mkdir('/new')", "None")
    result = escape(program, kind, f"{tmp_path}\n")
    assert result.status == "ok"
    if kind is JailKind.off:
        assert result.stdout.count("written") == 4
        assert (tmp_path / "new").exists()
    else:
        assert result.stdout == ""
        assert metrics.read_text() == "1\n"
        assert os.listdir(tmp_path) == ["metrics.jsonl"]
    assert not Path("/new").exists()


# 11. endless output


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@with_control
def test_endless_output_is_cut(kind: JailKind, stream: str) -> None:
    program = f"import sys\nwhile True:\n    sys.{stream}.write('x' * 9999)\n"
    result = escape(program, kind)
    assert result.status == "output"
    assert len(result.stdout) <= 2 << 16


# 12. sleeping past the limit


@with_control
def test_sleep_ends_at_the_limit_with_all_that_it_has_started(kind: JailKind) -> None:
    program = (
        "import os, signal, time\n"
        "for number in range(1, 31):\n"
        "    if number not in (signal.SIGKILL, signal.SIGSTOP):\n"
        "        signal.signal(number, signal.SIG_IGN)\n"
        "if not os.fork():\n"
        f"    {'pass' if kind is JailKind.off else 'os.setsid()'}\n"
        "    time.sleep(60)\n"
        "print('asleep', flush=True)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    assert escape(program, kind, seconds=0.3) == JailResult("timeout", "asleep\n")
    assert time.monotonic() - start < 30


# And: the death of the verifier


@with_control
def test_a_jail_dies_with_its_verifier(kind: JailKind) -> None:
    source = (
        "from hybridrl.config import JailKind, JailLimits\n"
        "from hybridrl.sandbox.jail import Jail\n"
        f"with Jail('import time; time.sleep(60)', None, JailKind('{kind.value}')) as jail:\n"
        "    print('ready', flush=True)\n"
        "    jail.run(seconds=60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, env=environment
    ) as verifier:
        assert verifier.stdout is not None
        assert verifier.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 30
        while len(jail_processes(verifier.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(jail_processes(verifier.pid)) >= 2  # the root of the jail, and the program
        verifier.kill()
    deadline = time.monotonic() + 30
    while jail_processes(verifier.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert jail_processes(verifier.pid) == []
