"""Which lines count as those of a GPU."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from gpu_dry.cuda_lines import ROOT, cuda_lines, device_fields

CASES = {
    "under a test": ("if device.type == 'cuda':\n    a()\nelse:\n    b()", {"a()"}),
    "under its opposite": ("if device.type != 'cuda':\n    a()\nelse:\n    b()", {"b()"}),
    "after an early return": ("if device.type == 'cpu':\n    return\na()\nb()", {"a()", "b()"}),
    "under a name": ("gpu = device == 'cuda'\nif gpu and x:\n    a()", {"a()"}),
    "besides the CPU": ("if x and y.device.type == 'cpu':\n    a()\nelse:\n    b()", {"b()"}),
    "within a loop": ("for x in y:\n    if x.is_cuda:\n        a()", {"a()"}),
    "under not": ("if not x.is_cuda:\n    a()\nelse:\n    b()", {"b()"}),
    "after an early return under not": ("if not x.is_cuda:\n    return\na()", {"a()"}),
    "a call": ("torch.cuda.synchronize()\na()", {"torch.cuda.synchronize()"}),
    "a context": ("with torch.cuda.device_of(x):\n    a()", {"with torch.cuda.device_of(x):"}),
    "a choice": ("b = 1 if device == 'cuda' else 2", {"b = 1 if device == 'cuda' else 2"}),
    "by the config": ("if cluster.device is Device.cuda and x:\n    a()\nb()", {"a()"}),
    "by its opposite": ("if cluster.device is not Device.cuda:\n    a()\nelse:\n    b()", {"b()"}),
    "besides CPUs": ("if config.cluster.device is Device.cpu:\n    return\na()", {"a()"}),
    "under a name by the config": ("gpu = device is Device.cuda\nif gpu:\n    a()", {"a()"}),
    "under a field": ("if needs.has_gpus:\n    a()\nelse:\n    b()", {"a()"}),
    "under a parameter": ("if not has_gpus:\n    a()\nelse:\n    b()", {"b()"}),
    "not known yet": ("if device is Device.auto:\n    a()", set()),
    "other tests": ("if x == 'cuda_graph':\n    a()", set()),
}


@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES.keys())
def test_lines_are_found(body: str, expected: set[str]) -> None:
    lines = ["def f():", *(f"    {line}" for line in body.splitlines())]
    functions = cuda_lines("\n".join(lines), ["has_gpus"])
    assert {lines[number - 1].strip() for number in functions} == expected
    assert set(functions.values()) <= {"f"}


def test_fields_that_calls_set_from_a_device_are_found() -> None:
    calls = "f(Needs(a=x is Device.cuda, b=x.is_cuda), c=x is Device.cpu, d=x, **e)"
    assert device_fields(calls) == {"a", "b"}


def test_the_lines_that_are_reached_are_noted(tmp_path: Path) -> None:
    """In a process that imports the module with probes; what it does is the same."""
    module = tmp_path / "probed.py"
    module.write_text(
        textwrap.dedent("""
        def f(device, deep):
            if device == "cuda":
                a = 1
                if deep:
                    a = 2
                else:
                    a = 3
                with open(__file__) as file:
                    return a, __import__("sys")._getframe().f_lineno
            return 0
        """)
    )
    program = """
        import sys
        from gpu_dry import cuda_lines
        cuda_lines.ROOT = cuda_lines.Path(sys.argv[1]).parent
        text = open(sys.argv[1]).read()
        probes = cuda_lines.LineProbes({sys.argv[1]: cuda_lines.cuda_lines(text)})
        probes.install()
        import probed
        print(probed.f("cpu", True), len(probes.missed()))
        print(probed.f("cuda", False), probes.missed())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(module)],
        env={"PYTHONPATH": f"{ROOT / 'tests'}:{tmp_path}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["0 6", "(3, 10) ['probed.py f: a = 2']"]
