"""`scripts/stub_judge.py`, a server that stands in for a judge, for several folders of tests."""

from script_modules import load_script

module = load_script("stub_judge.py")
StubJudge, grade = module.StubJudge, module.grade
