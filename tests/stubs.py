"""`scripts/stub_judge.py`, a server that stands in for a judge, for several folders of tests."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "scripts" / "stub_judge.py"

spec = importlib.util.spec_from_file_location("stub_judge", SCRIPT)
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)

StubJudge, grade = module.StubJudge, module.grade
