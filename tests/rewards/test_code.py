"""The verifier of programs: forms of tests, comparison, limits of a sample, and what is refused."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.config import (
    Config,
    ConfigError,
    DataConfig,
    EvalSetConfig,
    JailKind,
    JailLimits,
    JudgeConfig,
    RewardConfig,
    RewardKind,
    SourceConfig,
)
from hybridrl.preflight.judges import check_rows
from hybridrl.preflight.prepare import build_recipe
from hybridrl.rewards import JudgePool, RewardInput, jail, validate_reward
from hybridrl.rewards.code import judge_program, parse_tests, program_in, same_text, same_value
from hybridrl.sandbox.jail import Jail, JailError, JailResult, Mechanism, run

ADD = "a, b = map(int, input().split())\nprint(a + b)\n"
WRONG = "print(3)\n"
FUNCTION = "def add(a, b):\n    return a + b\n"
METHOD = (
    "class Solution:\n    def add(self, a: int, b: List[int]) -> int:\n        return a + sum(b)\n"
)


def config(**settings: Any) -> JudgeConfig:
    """Without a jail: what is judged does not depend on it, and every machine can.

    With time: on a loaded machine a Python takes seconds to start.
    """
    times = {"timeout_s": 60.0, "limits": JailLimits(seconds=20.0)}
    return JudgeConfig(**{"kind": RewardKind.code, "jail": JailKind.off, **times, **settings})


def share(program: str, answer: Any, **row: Any) -> float:
    return judge_program(program, {"answer": answer, **row}, config(partial_credit=True))


@pytest.mark.long
def test_text_in_and_out_as_apps_and_prime_store_it() -> None:
    tests = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7"]}
    for answer in (tests, json.dumps(tests), {"style": "rule", "ground_truth": json.dumps(tests)}):
        assert share(ADD, answer) == 1.0
        assert share(WRONG, answer) == 0.5
        assert judge_program(WRONG, {"answer": answer}, config()) == 0.0
        assert judge_program(ADD, {"answer": answer}, config()) == 1.0


def test_functions_as_apps_and_livecodebench_store_them() -> None:
    apps = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}
    assert share(FUNCTION, apps) == 1.0
    assert share("def add(a, b): return 3", json.dumps(apps)) == 0.5
    prime = {"fn_name": "add", "inputs": ["1\n[2, 3]"], "outputs": ["6"]}
    assert share(METHOD, prime) == 1.0
    entry = {"input": "1\n[2]", "output": "3", "testtype": "functional"}
    named = {**entry, "metadata": {"func_name": "add"}}
    assert share(METHOD, [named]) == 1.0
    assert share(METHOD, json.dumps([entry]), metadata=json.dumps({"func_name": "add"})) == 1.0
    text = {"input": "1 2", "output": "3", "testtype": "stdin"}
    assert share(ADD, [text, {**text, "output": "4"}]) == 0.5


def test_assertions_as_mbpp_and_humaneval_store_them() -> None:
    mbpp = ["assert add(1, 2) == 3", "assert add(1, 2) == floor(3.5)", "assert add(1, 1) == 3"]
    row = {"test_imports": ["from math import floor"], "test_setup_code": ""}
    assert share(FUNCTION, mbpp, **row) == 2 / 3
    humaneval = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    assert share(FUNCTION, humaneval, entry_point="add") == 1.0
    assert share(FUNCTION.replace("+", "-"), humaneval, entry_point="add") == 0.0
    pytest_style = "from solution import add\n\ndef test_add():\n    assert add(1, 2) == 3\n"
    assert share(FUNCTION, pytest_style) == 1.0
    assert share(FUNCTION.replace("+", "-"), pytest_style) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "import os\nfor file in range(3, 9):\n    try: os.write(file, b'ready\\n')\n"
        "    except OSError: pass\nos._exit(0)",
        "print('ok')",
        "def add(a, b): raise SystemExit(0)",
        "def add(a, b):\n    import os\n    os._exit(0)",
        "",
    ],
)
def test_a_program_that_leaves_early_passes_nothing(program: str) -> None:
    tests = {"inputs": ["1 2"], "outputs": ["3"]}
    assert share(program, ["assert add(1, 2) == 3"]) == 0.0
    assert share(program, {**tests, "inputs": [[1, 2]], "fn_name": "add"}) == 0.0
    assert share(program, tests) == 0.0


@pytest.mark.parametrize(
    ("output", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1 2  \n3\n\n", "1 2\n3", True),
        ("1.0 2\n", "1 2.00", True),
        ("1\n2\n", "1 2", False),
        ("  1", "1", True),
        ("1\n\n2", "1\n2", False),
        ("yes", "Yes", False),
        ("0.1", "0.10000001", False),
        ("nan", "inf", False),
        ("", "1", False),
    ],
)
def test_outputs_are_compared_by_lines_and_numbers(output: str, expected: str, same: bool) -> None:
    assert same_text(output, expected) is same


def test_values_are_compared_whole() -> None:
    assert same_value([1, 2], [1, 2])
    assert same_value(3, [3])
    assert not same_value([1, 2], [2, 1])
    assert not same_value(None, [3])


def test_the_last_block_of_python_is_the_program() -> None:
    response = "Try\n```python\nprint(1)\n```\nor better\n```python\nprint(2)\n```\n```\nout\n```"
    assert program_in(response) == "print(2)\n"
    assert program_in("print(3)") == "print(3)"
    assert program_in("```cpp\nint x;\n```") == "```cpp\nint x;\n```"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "no tests"),
        ([], "no tests"),
        ({"inputs": [], "outputs": []}, "no tests"),
        (None, "NoneType in place of tests"),
        ("42", "unit tests without assert"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs for 0 outputs"),
        ({"input": "1"}, r"\['input'\] without inputs and outputs"),
        ([{"input": "1"}], "a test without input and output"),
        ([{"input": "1", "output": "", "testtype": "functional"}], "without fn_name"),
        ("class T(unittest.TestCase): assertEqual", "unittest"),
    ],
)
def test_a_row_without_tests_is_refused(answer: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_tests({"answer": answer})


def test_a_row_without_tests_is_refused_before_a_run() -> None:
    graph = build_recipe({"target": "hybridrl.recipes.grpo:grpo"})
    settings = Config(data=DataConfig(sources={"mine": SourceConfig(name="mine.jsonl")}))
    settings.cost = RewardConfig(kind=RewardKind.code)  # of no stage
    good = {"question": "1+1", "answer": ["assert True"]}
    bad = {"question": "2+2", "answer": "4"}

    def data(*rows: dict[str, Any], source: str = "mine") -> Any:
        told = [{"answer": "", "answers": ("x",), "expected": row["answer"], "place": "row 2"}
                for row in rows]  # fmt: skip
        pairs = zip(rows, told, strict=True)
        return [SimpleNamespace(source=source, item=row, **more) for row, more in pairs]

    check_rows(settings, graph, data(good, bad))
    settings.reward = RewardConfig(kind=RewardKind.code)
    check_rows(settings, graph, data(good, good))
    with pytest.raises(ConfigError) as caught:
        check_rows(settings, graph, data(good, bad))
    assert str(caught.value) == (
        "data.sources.mine.answer_column=answer: wanted a column with tests in every row, "
        "for reward.kind=code (unit tests without assert, or of unittest; row 2: '2+2')"
    )
    # of an evaluation set with prompts of its own, and one whose own judge reads no tests
    own = SourceConfig(name="own.jsonl")
    settings.eval.sets["own"] = EvalSetConfig(source=own)
    with pytest.raises(ConfigError, match=r"^eval.sets.own.source.answer_column=answer: wanted"):
        check_rows(settings, graph, data(bad, source="eval.sets.own"))
    settings.eval.sets["own"] = EvalSetConfig(source=own, reward=RewardConfig())
    check_rows(settings, graph, data(bad, source="eval.sets.own"))


def test_a_sample_ends_within_its_time() -> None:
    tests = {"inputs": ["0\n"] + ["9\n"] * 500, "outputs": [""] * 501}
    program = "import time\ntime.sleep(int(input()))\n"
    settings = config(partial_credit=True, timeout_s=3.0, limits=JailLimits(seconds=1.0))
    start = time.monotonic()
    assert judge_program(program, {"answer": tests}, settings) == 1 / 501
    assert time.monotonic() - start < 100.0  # all tests would take 500 s


@pytest.mark.long
def test_the_pool_judges_programs_and_says_where_they_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "hybridrl.rewards")
    tests = {"inputs": ["1 2\n"], "outputs": ["3\n"]}
    responses = [f"```python\n{ADD}```", ADD, "print(4)", "words", "while True: pass"]
    settings = config(limits=JailLimits(seconds=2.0), timeout_s=30.0)
    with JudgePool(settings) as pool:
        results = pool.score([RewardInput("", text, "", expected=tests) for text in responses])
        assert [result.reward for result in results] == [1.0, 1.0, 0.0, 0.0, 0.0]
        assert {result.status for result in results} == {"ok"}
        (broken,) = pool.score([RewardInput("", ADD, "", expected=[])])
    assert (broken.reward, broken.status) == (0.0, "error")
    assert "no tests" in broken.message
    assert any("no jail: limits alone" in line for line in caplog.messages)


def test_a_users_function_may_run_programs(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from hybridrl.rewards import jail\n\n"
        "def score(prompt, response, answer, item):\n"
        "    result = jail.run(response, stdin='7\\n')\n"
        "    return float(result.status == 'ok' and result.stdout == answer)\n"
    )
    settings = config(kind=RewardKind.function, function=f"{path}:score")
    with JudgePool(settings) as pool:
        items = [RewardInput("", "print(int(input()) * 6)", answer) for answer in ("42\n", "7\n")]
        assert [result.reward for result in pool.score(items)] == [1.0, 0.0]


# --- the jail's own interface ------------------------------------------------------------------


@pytest.mark.long
def test_results_say_what_a_program_did() -> None:
    off = JailKind.off
    assert run("print(input())", "x\n", kind=off) == JailResult("ok", "x\n")
    result = run("import sys\nprint(1)\nprint(2, file=sys.stderr)\nsys.exit(3)", kind=off)
    assert (result.status, result.stdout, result.stderr) == ("error", "1\n", "2\n")
    assert "ZeroDivisionError" in run("1 / 0", kind=off).stderr
    late = "import atexit, threading, time\natexit.register(print, 'exit')\n"
    late += "threading.Thread(target=lambda: (time.sleep(0.05), print('thread'))).start()\n"
    assert run(late, kind=off).stdout == "thread\nexit\n"
    unclosed = "out = open(1, 'w', closefd=False)\nout.write('1')\nimport sys\nsys.stdout.close()"
    assert run(unclosed, kind=off) == JailResult("ok", "1")
    words = run("import sys\nsys.exit('words')", kind=off)
    assert (words.status, words.stderr) == ("error", "words\n")
    assert run("print(open(0).read())", "é" * 200_000, kind=off).stdout == "é" * 200_000 + "\n"
    assert run("print(len({'a', 'b'}), hash('a'))", kind=off) == run(
        "print(len({'a', 'b'}), hash('a'))", kind=off
    )


def test_a_jail_runs_a_program_anew_each_time() -> None:
    program = "import sys\nsys.seen = getattr(sys, 'seen', 0) + 1\nprint(input(), sys.seen)\n"
    with Jail(program, kind=JailKind.off) as opened:
        assert [opened.run(f"{n}\n").stdout for n in range(3)] == ["0 1\n", "1 1\n", "2 1\n"]
    with Jail("def twice(x):\n    return {'x': (x, x)}\n", kind=JailKind.off) as opened:
        assert opened.call("twice", [2]).value == {"x": [2, 2]}
        assert opened.call("thrice", [2]).status == "error"
        assert opened.check("assert twice(1)['x'] == (1, 1)").status == "ok"
        assert opened.check("assert twice(1)['x'] == (1, 2)").status == "error"


def test_a_jail_that_does_not_work_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    obstacles = {JailKind.bubblewrap: "bwrap is not installed", JailKind.namespaces: "unshare: no"}
    monkeypatch.setattr(jail, "try_mechanism", obstacles.__getitem__)
    jail.choose.cache_clear()
    with pytest.raises(ConfigError) as caught:
        jail.choose(JailKind.auto)
    assert str(caught.value) == (
        "reward.jail=auto: wanted off, or a machine on which a jail works "
        "(bubblewrap: bwrap is not installed; namespaces: unshare: no)"
    )
    with pytest.raises(ConfigError, match=r"reward\.jail=namespaces.*unshare: no"):
        jail.choose(JailKind.namespaces)
    good = Mechanism(JailKind.namespaces, ("Landlock",))
    monkeypatch.setattr(jail, "try_mechanism", {**obstacles, JailKind.namespaces: good}.__getitem__)
    assert jail.choose(JailKind.auto) is good
    assert str(good) == "namespaces, Landlock"
    jail.choose.cache_clear()


def test_bubblewrap_that_fails_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bwrap").write_text("#!/bin/sh\necho bwrap: no permissions >&2\nexit 1\n")
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert jail.try_mechanism(JailKind.bubblewrap) == "bwrap: no permissions"
    # One that confines nothing: it runs what follows `--` as it is.
    (tmp_path / "bwrap").write_text(
        '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\n"$@"\n'
    )
    outcome = jail.try_mechanism(JailKind.bubblewrap)
    assert isinstance(outcome, str)
    monkeypatch.setenv("PATH", "/nowhere")
    assert jail.try_mechanism(JailKind.bubblewrap) == "bwrap is not installed"


@pytest.mark.parametrize("name", JailLimits.__slots__)
def test_limits_of_zero_are_refused(name: str) -> None:
    settings = RewardConfig(limits=JailLimits(**{name: 0}))
    with pytest.raises(ConfigError, match=rf"reward\.limits\.{name}=0: wanted"):
        Config(reward=settings)


def test_a_test_cannot_take_longer_than_its_sample() -> None:
    settings = RewardConfig(kind=RewardKind.code, timeout_s=1.0)
    with pytest.raises(
        ConfigError, match=r"reward\.limits\.seconds=2\.0: wanted at most reward.timeout_s=1"
    ):
        settings.check("reward")


def test_the_check_before_a_run_names_the_key_of_its_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    settings = config(jail=JailKind.bubblewrap)
    with pytest.raises(ConfigError, match=r"cost\.jail=bubblewrap.*bwrap is not installed"):
        validate_reward(settings, role="cost")


def test_an_error_of_the_jail_is_an_error_of_the_sample() -> None:
    program = "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n"
    with Jail(program, kind=JailKind.off) as opened, pytest.raises(JailError):
        opened.run()
