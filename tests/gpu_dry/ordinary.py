"""`python -m gpu_dry.ordinary OUT TEST...`: the lines for a GPU that each ordinary test misses."""

from gpu_dry.cuda_lines import LineProbes

probes = LineProbes()
probes.install()  # before the package

import json  # noqa: E402
import sys  # noqa: E402
from collections import defaultdict  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402

import pytest  # noqa: E402


class ReachedLines:
    """The lines that each test runs, its cases together."""

    def __init__(self) -> None:
        self.of_tests: dict[str, set[tuple[str, int]]] = defaultdict(set)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        probes.take_reached()
        outcome = yield
        self.of_tests[item.nodeid.partition("[")[0]] |= probes.take_reached()
        return outcome


if __name__ == "__main__":
    out, *tests = sys.argv[1:]
    reached = ReachedLines()
    marked = ["-m", "not slow and not layouts"]  # of the long ones, too
    code = pytest.main(["-q", "-p", "no:cacheprovider", *marked, *tests], plugins=[reached])
    missed = {test: probes.missed(lines) for test, lines in reached.of_tests.items()}
    Path(out).write_text(json.dumps(missed))
    sys.exit(code)
