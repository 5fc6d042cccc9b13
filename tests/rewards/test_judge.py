"""Judges that compute, with real processes: who is guilty is marked, the others get rewards."""

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, RewardConfig, RewardKind, SourceConfig
from hybridrl.rewards import JudgePool, RewardInput, RewardResult, validate_reward
from hybridrl.rewards.results import result_of
from hybridrl.sandbox import process

FUNCTIONS = """
import os, subprocess, sys, time

def score(prompt, response, answer, item):
    print("garbage" * 1000)
    print("garbage" * 1000, file=sys.stderr)
    if response == "raise":
        raise RuntimeError("no")
    if response == "hang":
        time.sleep(100)
    if response == "spin":
        sum(range(10**12))  # holds the interpreter
    if response == "child":
        subprocess.Popen(["sleep", "98.765"])
        time.sleep(100)
    if response == "nan":
        return float("nan")
    if response == "text":
        return "1"
    if response == "exit":
        sys.exit(3)
    if response == "die":
        os._exit(3)
    if response == "kill":
        os.kill(os.getpid(), 9)
    if response == "memory":
        bytearray(5 << 30)
    if response == "modules":
        return len({"torch", "ray", "transformers"} & set(sys.modules))
    if response == "pid":
        return os.getpid()
    return len(response)

no_function = 3
"""


@pytest.fixture
def function_file(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.fixture
def config(function_file: Path) -> RewardConfig:
    return RewardConfig(kind=RewardKind.function, function=f"{function_file}:score", timeout_s=0.5)


@pytest.fixture
def rewards(config: RewardConfig) -> Iterator[JudgePool]:
    with JudgePool(config) as opened:
        yield opened


def inputs(*responses: str) -> list[RewardInput]:
    return [RewardInput("", response, "") for response in responses]


@pytest.mark.layouts
def test_only_the_guilty_sample_is_marked(
    rewards: JudgePool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", "hybridrl")
    bad = {
        "raise": ("error", "RuntimeError: no"),
        "hang": ("timeout", "no reward within 0.5 s"),
        "nan": ("error", "ValueError: the reward is nan, wanted a finite number"),
        "text": ("error", "TypeError: the reward is str, wanted a number"),
        "exit": ("error", "SystemExit: 3"),
        "die": ("error", "the verifier process ended (exit code 3)"),
        "kill": ("error", "the verifier process ended (SIGKILL)"),
        "memory": ("error", "MemoryError: "),
        "spin": ("timeout", "no reward within 0.5 s"),
    }
    responses = [name for pair in zip(bad, "abcdefghi", strict=True) for name in pair]
    results = rewards.score(inputs(*responses, "modules"))
    for response, result in zip(responses, results, strict=False):
        if response in bad:
            assert result == RewardResult(0.0, *bad[response])
        else:
            assert result == RewardResult(1.0, text=response)
    assert results[-1] == RewardResult(
        0.0, text="modules"
    )  # neither torch nor ray nor transformers
    assert sum("is replaced: no reward within 0.5 s" in line for line in caplog.messages) == 2
    assert f"{len(results)} responses are verified" in caplog.messages
    assert rewards.score(inputs("again"))[0].reward == 5.0


def test_order_is_kept_over_processes_and_threads(config: RewardConfig) -> None:
    config.num_processes = 2
    with JudgePool(config) as rewards:
        scores: dict[int, list[float]] = {}

        def run(start: int) -> None:
            texts = ["x" * n for n in range(start, start + 37)]
            scores[start] = [result.reward for result in rewards.score(inputs(*texts))]

        threads = [threading.Thread(target=run, args=(start,)) for start in (0, 50, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert scores == {start: list(map(float, range(start, start + 37))) for start in scores}
        assert len(scores) == 3
        assert rewards.score([]) == []
        # The threads that scored are gone; the processes live on with the pool.
        first = {result.reward for result in rewards.score(inputs(*["pid"] * 20))}
        assert first <= {float(process.popen.pid) for process in rewards._processes}


def test_cheap_calls_are_sent_many_at_a_time(config: RewardConfig) -> None:
    """So many as take the 20 ms of a window, but at least 4, and at most 128."""
    # None is to time out: a loaded machine may leave a process for half a second.
    with JudgePool(replace(config, timeout_s=10.0)) as rewards:
        rewards.wait_ready(every=True)
        windows = []
        for calls_a_second in (1, 1000, 10**6):
            process = rewards._processes[0]
            process.busy_since, process.num_answers = time.time() - 1.0, calls_a_second
            rewards._note_busy(process)
            windows.append(rewards.window)
        results = rewards.score(inputs("a", "bc") * 200)
    assert windows[0] == 4
    assert 18 <= windows[1] <= 20, "a second and some microseconds"
    assert windows[2] == 128
    assert [result.reward for result in results] == [1.0, 2.0] * 200


def test_nothing_is_left_after_close(config: RewardConfig) -> None:
    before = children()
    rewards = JudgePool(config)
    pid = int(rewards.score(inputs("pid"))[0].reward)
    assert rewards.score(inputs("child"))[0].status == "timeout"
    rewards.score(inputs("a"))
    rewards.close()
    rewards.close()
    assert not alive(pid)
    assert children() <= before
    assert "sleep 98.765" not in command_lines()
    with pytest.raises(ValueError, match="closed"):
        rewards.score(inputs("a"))


@pytest.mark.long
def test_a_regular_expression_that_backtracks_for_ever_is_stopped() -> None:
    config = RewardConfig(kind=RewardKind.regex, pattern=r"(a+)+{answer}", timeout_s=0.3)
    with JudgePool(config) as rewards:
        items = [RewardInput("", text, "b") for text in ("aab", "a" * 64 + "c", "ab")]
        results = rewards.score(items)
    assert [(r.reward, r.status) for r in results] == [(1.0, "ok"), (0.0, "timeout"), (1.0, "ok")]


@pytest.mark.long
def test_a_dataset_is_scored_without_torch() -> None:
    config = RewardConfig(kind=RewardKind.dataset, timeout_s=5.0)
    with JudgePool(config, {"w": SourceConfig(name="spell_backward")}) as rewards:
        item = {"question": "", "answer": "ab", "metadata": {"difficulty": {"word_len": (3, 8)}}}
        results = rewards.score([RewardInput("", "ab", "ab", item, "w")] * 3)
        assert results == [RewardResult(1.0, text="ab")] * 3
        maps = Path(f"/proc/{rewards._processes[0].popen.pid}/maps").read_text()
        assert "libtorch" not in maps


def test_exact_match_starts_no_process() -> None:
    with JudgePool(RewardConfig()) as rewards:
        assert rewards._processes == []
        items = [RewardInput("", text, "b") for text in ("a", "b")]
        assert rewards.score(items) == [RewardResult(0.0, text="a"), RewardResult(1.0, text="b")]


@pytest.mark.long
def test_validation_starts_what_the_run_would(
    function_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate_reward(RewardConfig())
    validate_reward(RewardConfig(kind=RewardKind.math))
    good = RewardConfig(kind=RewardKind.function, function=f"{function_file}:score")
    validate_reward(good)
    dotted = RewardConfig(kind=RewardKind.function, function="functions:score")
    with pytest.raises(ConfigError, match=r"reward\.function=functions:score.*ModuleNotFound"):
        validate_reward(dotted)
    monkeypatch.syspath_prepend(str(tmp_path))
    validate_reward(dotted)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_colon", "wanted package.module:name or /path/file.py:name"),
        ("no.such.module:f", "No module named 'no'"),
        ("json:nothing", "has no attribute 'nothing'"),
        ("/no/such/file.py:f", "No such file"),
        ("{file}:nothing", "has no attribute 'nothing'"),
        ("{file}:no_function", "a function, not int"),
        ("{raises}:f", "RuntimeError: broken"),
        ("{exits}:f", "SystemExit: 1"),
        ("{dies}:f", "exit code 7"),
        ("{hangs}:f", "was not ready within 2 s"),
    ],
)
def test_a_function_that_cannot_be_had_is_named(
    path: str,
    message: str,
    function_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "hangs" in path:
        monkeypatch.setattr(process, "START_TIMEOUT_S", 2.0)
    modules = {
        "raises": "raise RuntimeError('broken')",
        "exits": "raise SystemExit(1)",
        "dies": "import os; os._exit(7)",
        "hangs": "import time; time.sleep(100)",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    files = {name: str(tmp_path / f"{name}.py") for name in modules}
    function = path.format(file=function_file, **files)
    with pytest.raises(ConfigError) as caught:
        validate_reward(RewardConfig(kind=RewardKind.function, function=function))
    assert caught.value.key == "reward.function"
    assert function in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_process_that_is_killed_while_it_starts_is_started_again(tmp_path: Path) -> None:
    """So is the first one."""
    (tmp_path / "killed.py").write_text(
        "import os, pathlib, signal\n"
        "file = pathlib.Path(__file__).with_name('was_killed')\n"
        "if not file.exists():\n"
        "    file.touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def f(prompt, response, answer, item):\n"
        "    return 1.0\n"
    )
    function = f"{tmp_path}/killed.py:f"
    validate_reward(RewardConfig(kind=RewardKind.function, function=function))
    assert (tmp_path / "was_killed").exists()


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (RewardConfig(extract="("), "reward.extract"),
        (RewardConfig(kind=RewardKind.regex, pattern="("), "reward.pattern"),
        (RewardConfig(kind=RewardKind.dataset), "reward.kind"),
    ],
)
def test_other_settings_that_cannot_work_are_named(config: RewardConfig, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate_reward(config)
    assert caught.value.key == key


@pytest.mark.parametrize("answer", [[None, None, ""], ["1", None, ""], [float("nan"), None, ""]])
def test_a_reward_that_is_none_is_no_answer(answer: list[object]) -> None:
    with pytest.raises(ValueError, match="is no reward"):
        result_of(answer)


@pytest.mark.long
def test_lone_surrogates_in_what_a_judge_says_are_replaced_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each pool warns of it once, however many processes it has."""
    file = tmp_path / "says.py"
    file.write_text("def score(response):\n    raise ValueError(response)\n")
    config = RewardConfig(kind=RewardKind.function, function=f"{file}:score", num_processes=2)
    items = [RewardInput("", "a\ud83db\U0001f600", "")]
    (result,) = validate_reward(config, items=items).results
    assert result.message.endswith("ValueError: a?b\U0001f600")
    with JudgePool(config) as judge:
        judge.wait_ready(every=True)
        assert judge.score(items * 16) == [result] * 16
    line, again = caplog.messages
    assert line == again
    assert "an answer of the verifier (reward.kind=function) holds lone surrogates" in line
    assert "characters (1): each is replaced with a question mark" in line


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie, which waits for a slow init, does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> set[str]:
    """Ids of this process's children."""
    tasks = Path(f"/proc/{os.getpid()}/task").iterdir()
    pids: set[str] = set()
    for task in tasks:
        with contextlib.suppress(OSError):  # a thread of another library has ended
            pids.update((task / "children").read_text().split())
    return pids


def command_lines() -> str:
    """Command lines of all running processes."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return "\n".join(lines)
