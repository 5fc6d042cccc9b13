"""The tests that are marked `gpu`."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

from gpu_steps import ROOT
from gpu_steps.figures import Figures
from gpu_steps.steps import Settings

_FIXTURES_NEED = ("cloudpickle", "hydra", "hypothesis", "psutil", "ray")


def measure(settings: Settings, figures: Figures) -> None:
    """Run them with pytest, and count; a failure fails the step."""
    files = [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if _marked(path)]
    report = Path(settings.folder) / "tests.xml"
    report.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-o", "addopts=--import-mode=importlib"),
        *("-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"),
        *("-p", "gpu_steps"),  # it finds hybridrl in this tree
    ]
    if not all(map(importlib.util.find_spec, _FIXTURES_NEED)):
        command.append("--noconftest")  # these tests do without the shared fixtures
    code = subprocess.run([*command, *map(str, files)], cwd=ROOT, check=False).returncode
    if not report.is_file():
        raise RuntimeError(f"pytest ended with {code} before any test")
    count = _count(report)
    for name, number in count.items():
        figures.add(f"tests_{name}", number)
    if count["failed"]:
        raise RuntimeError(f"{count['failed']} tests marked gpu failed")


def _marked(path: Path) -> bool:
    return re.search(r"pytest\.mark\.gpu\b", path.read_text()) is not None


def _count(report: Path) -> dict[str, int]:
    """Tests by outcome, from pytest's report."""
    (suite,) = ElementTree.parse(report).getroot().iter("testsuite")
    total, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return {"passed": total - skipped - failed, "failed": failed, "skipped": skipped}
