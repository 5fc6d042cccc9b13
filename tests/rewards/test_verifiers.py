"""Each verifier on its own."""

import threading
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, RewardConfig, RewardKind, SourceConfig, SourceKind
from hybridrl.rewards import RewardInput
from hybridrl.rewards.results import as_reward
from hybridrl.rewards.worker import make_verifier


def judge(config: RewardConfig, response: str, answer: str) -> float:
    return make_verifier(config)(RewardInput("question", response, answer))[0]


def test_exact() -> None:
    config = RewardConfig(kind=RewardKind.exact)
    assert judge(config, "drow", "drow") == 1.0
    assert judge(config, "drow ", "drow") == 0.0


@pytest.mark.parametrize(
    ("extract", "response", "reward"),
    [
        (r"#(.*)$", "4,8>4,4#4", 1.0),
        (r"#(.*)$", "no marker, 4", 0.0),
        (r"-?\d+", "first 7, then 4", 1.0),  # the last match; without a group all of it
        (r"-?\d+", "first 4, then 7", 0.0),
        (r"x(\d)?", "4 x", 0.0),  # a group that took no part
    ],
)
def test_extract_gives_the_text_to_judge(extract: str, response: str, reward: float) -> None:
    assert judge(RewardConfig(extract=extract), response, "4") == reward


def test_no_match_scores_zero_even_for_an_empty_answer() -> None:
    assert judge(RewardConfig(extract="#(.*)"), "nothing", "") == 0.0


def test_regex_matches_the_whole_text_and_escapes_the_answer() -> None:
    config = RewardConfig(kind=RewardKind.regex, pattern=r"\s*(is )?{answer}\.?")
    assert judge(config, " is 3+4.", "3+4") == 1.0
    assert judge(config, "334", "3+4") == 0.0
    assert judge(config, "so is 3+4", "3+4") == 0.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so it is $\frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{2x + 1}", "$1 + 2x$", 1.0),
        ("the answer is 12", "12", 1.0),
        ("the answer is 13", "12", 0.0),
        ("no idea", "12", 0.0),
        (r"$\{1, 2\}$", r"\{2, 1\}", 1.0),
    ],
)
def test_math_in_a_thread_where_alarms_do_not_work(
    response: str, answer: str, reward: float
) -> None:
    rewards: list[float] = []
    config = RewardConfig(kind=RewardKind.math)
    thread = threading.Thread(target=lambda: rewards.append(judge(config, response, answer)))
    thread.start()
    thread.join()
    assert rewards == [reward]


def test_dataset_uses_its_own_scorer_per_source() -> None:
    sources = {"words": SourceConfig(name="spell_backward"), "sums": SourceConfig(name="chain_sum")}
    verify = make_verifier(RewardConfig(kind=RewardKind.dataset, extract="#(.*)"), sources)
    word = {"question": "", "answer": "drow", "metadata": {"source_dataset": "spell_backward"}}
    assert verify(RewardInput("", "#drow", "drow", word, "words")) == (1.0, "drow")
    assert 0 < verify(RewardInput("", "#drox", "drow", word, "words"))[0] < 1
    total = {"question": "", "answer": "12", "metadata": {"source_dataset": "chain_sum"}}
    assert verify(RewardInput("", "#12", "12", total, "sums")) == (1.0, "12")
    assert verify(RewardInput("", "12", "12", total, "sums")) == (0.0, "")
    assert verify(RewardInput("", "#drow", "12", total, "sums"))[0] < 0.5


def test_dataset_needs_reasoning_gym() -> None:
    sources = {"file": SourceConfig(kind=SourceKind.jsonl, name="x.jsonl")}
    with pytest.raises(ConfigError, match=r"reward\.kind=dataset.*'file': 'jsonl'"):
        make_verifier(RewardConfig(kind=RewardKind.dataset), sources)


def test_function_gets_the_sample(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(prompt, response, answer, item):\n"
        "    assert (prompt, response, answer, item) == ('p', 'r', 'a', {'n': 1}), locals()\n"
        "    return True\n"
    )
    config = RewardConfig(kind=RewardKind.function, function=f"{path}:score", extract="<(.*)>")
    reward, _ = make_verifier(config)(RewardInput("p", "x<r>y", "a", {"n": 1}))
    assert (reward, type(reward)) == (1.0, float)


@pytest.mark.parametrize("value", ["1", None, float("nan"), float("inf"), [1.0], 1j])
def test_what_is_no_reward(value: object) -> None:
    with pytest.raises((TypeError, ValueError), match="the reward is"):
        as_reward(value)
