"""Which lines count as those of a GPU."""

import pytest

from gpu_dry.cuda_lines import cuda_lines

CASES = {
    "under a test": ("if device.type == 'cuda':\n    a()\nelse:\n    b()", {"a()"}),
    "under its opposite": ("if device.type != 'cuda':\n    a()\nelse:\n    b()", {"b()"}),
    "after an early return": ("if device.type == 'cpu':\n    return\na()\nb()", {"a()", "b()"}),
    "under a name": ("gpu = device == 'cuda'\nif gpu and x:\n    a()", {"a()"}),
    "besides the CPU": ("if x and y.device.type == 'cpu':\n    a()\nelse:\n    b()", {"b()"}),
    "within a loop": ("for x in y:\n    if x.is_cuda:\n        a()", {"a()"}),
    "a call": ("torch.cuda.synchronize()\na()", {"torch.cuda.synchronize()"}),
    "a context": ("with torch.cuda.device_of(x):\n    a()", {"with torch.cuda.device_of(x):"}),
    "a choice": ("b = 1 if device == 'cuda' else 2", {"b = 1 if device == 'cuda' else 2"}),
    "other tests": ("if x == 'cuda_graph':\n    a()", set()),
}


@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES.keys())
def test_lines_are_found(body: str, expected: set[str]) -> None:
    lines = ["def f():", *(f"    {line}" for line in body.splitlines())]
    functions = cuda_lines("\n".join(lines))
    assert {lines[number - 1].strip() for number in functions} == expected
    assert set(functions.values()) <= {"f"}
