"""Reward functions as users have them: ours, verl's and TRL's signatures, and odd returns."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from hybridrl.config import ConfigError, RewardCall, RewardConfig, RewardKind
from hybridrl.rewards import JudgePool, RewardInput, validate_reward
from hybridrl.rewards.functions import user_function
from hybridrl.rewards.results import as_reward

FUNCTIONS = """
def ours(prompt, response, answer, item):
    return float(response == answer and item["question"] == prompt)

def some_of_ours(response, answer):
    return float(response == answer)

def ours_of_many(prompts, responses, answers, items):
    return [float(r == a) for r, a in zip(responses, answers)]

def anything(**kwargs):
    assert sorted(kwargs) == ["answer", "item", "prompt", "response"]
    return float(kwargs["response"] == kwargs["answer"])

def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "openai/gsm8k" and extra_info["index"] in (1, 2)
    return float(solution_str == ground_truth)

def verl_dict(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": float(solution_str == ground_truth), "acc": True}

def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": float(s == g)} for s, g in zip(solution_strs, ground_truths)]

def trl(completions, reward_model, **kwargs):
    assert len(kwargs["prompts"]) == len(completions) == len(reward_model)
    return [float(c[0]["content"] == r["ground_truth"]) for c, r in zip(completions, reward_model)]

def trl_own_columns(prompts, completions, data_source):
    assert prompts[0][0]["role"] == "user" and set(data_source) == {"openai/gsm8k"}
    return numpy.array([float(c[0]["content"][-1] in "23") for c in completions])

import numpy
"""


def item(n: int, response: str) -> RewardInput:
    """A response to a row of verl's, whose answer is n + 1."""
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{n} + 1 ="}],
        "question": f"{n} + 1 =",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n},
    }
    return RewardInput(
        f"{n} + 1 =", response, str(n + 1), row, "main", answers=(str(n + 1),),
        question=row["prompt"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("functions") / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def config(file: Path, name: str, **settings: Any) -> RewardConfig:
    return RewardConfig(kind=RewardKind.function, function=f"{file}:{name}", **settings)


SAMPLES = [item(1, "2"), item(1, "3"), item(2, "3"), item(2, "4")]
NAMES = ["ours", "some_of_ours", "anything", "verl", "verl_dict"]
OF_SEVERAL = ["ours_of_many", "verl_batch", "trl"]


@pytest.mark.parametrize("name", [*NAMES, *OF_SEVERAL])
def test_one_response_a_call(file: Path, name: str) -> None:
    with JudgePool(config(file, name)) as pool:
        results = pool.score(SAMPLES)
    assert [(r.status, r.reward) for r in results] == [("ok", x) for x in (1.0, 0.0, 1.0, 0.0)]


@pytest.mark.parametrize("name", [*OF_SEVERAL, "trl_own_columns"])
def test_several_responses_a_call(file: Path, name: str) -> None:
    with JudgePool(config(file, name, call=RewardCall.batch)) as pool:
        results = pool.score(SAMPLES[:3] if name == "trl_own_columns" else SAMPLES)
    expected = [1.0, 1.0, 1.0] if name == "trl_own_columns" else [1.0, 0.0, 1.0, 0.0]
    assert [(result.status, result.reward) for result in results] == [("ok", x) for x in expected]


def test_the_struct_of_verl_is_told_by_its_ground_truth(file: Path) -> None:
    struct = {"style": "rule", "ground_truth": {"target": 7, "numbers": [3, 4]}}
    path = file.with_name("struct.py")
    path.write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(ground_truth == {'target': 7, 'numbers': [3, 4]})\n"
        "def mine(response, answer):\n"
        "    return float(answer['style'] == 'rule')\n"
    )
    sample = RewardInput("", "3 + 4", "", {"data_source": "x"}, "main", expected=struct)
    for name in ("score", "mine"):
        with JudgePool(config(path, name)) as pool:
            assert [r.reward for r in pool.score([sample])] == [1.0]


UNCLEAR: dict[str, tuple[str, str]] = {
    "nobody's parameters": ("(text, gold)", r"it has \(text, gold\)"),
    "no parameter": ("()", r"it has \(\)"),
    "ours and verl's": ("(response, solution_str)", r"it has \(response, solution_str\)"),
    "one that is not passed": ("(response, tokenizer)", "not tokenizer"),
    "one that verl has not": ("(solution_str, ground_truth, model)", "not model"),
    "by position alone": ("(response, /)", r"by name; it has \(response, /\)"),
    "some by position": ("(prompt, /, response)", r"by name; it has \(prompt, /, response\)"),
    "any number": ("(*args)", r"by name; it has \(\*args\)"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_unclear_parameters_are_refused(tmp_path: Path, case: str) -> None:
    parameters, message = UNCLEAR[case]
    (tmp_path / "mine.py").write_text(f"def score{parameters}: return 1.0\n")
    with pytest.raises(ConfigError, match=message) as caught:
        validate_reward(config(tmp_path / "mine.py", "score"), role="cost")
    assert caught.value.key == "cost.function"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "wanted"),
    [
        ("completions, difficulty, answers", "answers, difficulty"),
        ("completions, completion_ids", "completion_ids, which judges do not get"),
        ("data_source, solution_str, ground_truth", "data_source"),
        ("data_sources, solution_strs, ground_truths, extra_infos", "data_sources"),
    ],
)
def test_a_column_that_rows_do_not_have(tmp_path: Path, parameters: str, wanted: str) -> None:
    """It is named with those that there are; one with a default may be missing."""
    (tmp_path / "mine.py").write_text(f"def score({parameters}): return [1.0]\n")
    row = RewardInput("1+1", "2", "2", {"question": "1+1", "answer": "2"}, "main", answers=("2",))
    (result,) = validate_reward(config(tmp_path / "mine.py", "score"), items=[row]).results
    message = (
        f"ValueError: the function wants {wanted}; the columns of the row are question, answer"
    )
    assert result.message == message
    defaults = ", ".join(f"{name}=None" for name in parameters.split(", "))
    (tmp_path / "other.py").write_text(f"def score({defaults}): return [1.0][0]\n")
    trial = validate_reward(config(tmp_path / "other.py", "score"), items=[row])
    assert "wants" not in trial.results[0].message


def test_a_function_of_one_response_is_no_batch(file: Path) -> None:
    for name in NAMES:
        with pytest.raises(
            ConfigError, match=r"reward\.call=batch: wanted sample: .* one response"
        ):
            user_function(config(file, name, call=RewardCall.batch))


@pytest.mark.parametrize(
    "value",
    [1, 0.5, True, numpy.float32(1), numpy.int64(2), numpy.bool_(True), numpy.array(0.5),
     torch.tensor(1.0)],
)  # fmt: skip
def test_scalars_are_numbers(value: Any) -> None:
    assert as_reward(value) == float(value)


@pytest.mark.parametrize(
    "value", [None, "1", {"score": 1.0}, [1.0], numpy.array([1.0]), torch.ones(1), 1j]
)
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="wanted a number"):
        as_reward(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, -1e19])
def test_numbers_that_cannot_be_compared_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="wanted"):
        as_reward(value)


@pytest.mark.parametrize(
    "returned", ["None", "{'score': 1.0}", "'1'", "[1.0]", "1e308", "1 / 0", "float('nan')"]
)
def test_what_comes_of_a_row_is_known_before_a_run(tmp_path: Path, returned: str) -> None:
    (tmp_path / "mine.py").write_text(f"def score(response): return {returned}\n")
    trial = validate_reward(config(tmp_path / "mine.py", "score"), items=SAMPLES[:1])
    (result,) = trial.results
    assert result.status == "error"
    assert result.message


def test_a_trial_of_a_function_that_waits(file: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import asyncio\n"
        "async def score(solution_str, ground_truth):\n"
        "    await asyncio.sleep(0.01)\n"
        "    return float(solution_str == ground_truth)\n"
        "def dies(response): import os; os._exit(1)\n"
        "def hangs(response): import time; time.sleep(60)\n"
    )
    trial = validate_reward(config(tmp_path / "mine.py", "score"), items=SAMPLES)
    assert trial.waits
    central = config(tmp_path / "mine.py", "score", waits=True)
    trial = validate_reward(central, items=SAMPLES)
    assert [result.reward for result in trial.results] == [1.0, 0.0, 1.0, 0.0]
    trial = validate_reward(config(tmp_path / "mine.py", "dies"), items=SAMPLES[:2])
    assert [result.status for result in trial.results] == ["error", "error"]
    slow = config(tmp_path / "mine.py", "hangs", timeout_s=0.2)
    trial = validate_reward(slow, items=SAMPLES[:1])
    assert [result.status for result in trial.results] == ["timeout"]


def called(tmp_path: Path, source: str, items: list[RewardInput]) -> Any:
    """What a batch of responses gets of a function `score`, in this process."""
    (tmp_path / "score.py").write_text(source)
    function = user_function(config(tmp_path / "score.py", "score"))
    returned = function.function(**function.arguments(items, [x.response for x in items]))
    return function.answers(returned, [x.response for x in items])


@pytest.mark.parametrize("value", [7, 72.0, True])
def test_verl_gets_a_number_as_the_row_has_it(tmp_path: Path, value: Any) -> None:
    """So `answer_column=reward_model.ground_truth` means what `reward_model` does."""
    source = (
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        f"    return float(isinstance(ground_truth, {type(value).__name__}))"
    )
    told = RewardInput("", "", str(value), {"data_source": "s"}, "main", expected=value)
    ((reward, message, _),) = called(tmp_path, source, [told])
    assert (reward, message) == (1.0, None)
    assert told.told_answer == str(value), "functions of ours get its text"


def test_trl_gets_the_column_of_the_prompts(tmp_path: Path) -> None:
    """Other columns may be called `prompt` and `question`, too."""
    row = {"problem": "2+2=", "question": "another", "prompt": "a third"}
    source = "def score(prompts, completions): return [float(p == '2+2=') for p in prompts]"
    told = RewardInput("", "4", "4", row, "main", question=row["problem"])
    answers = called(tmp_path, source, [told] * 2)
    assert [answer[:2] for answer in answers] == [[1.0, None]] * 2


def test_a_set_of_rewards_has_no_order(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="the function returned set, wanted a list of numbers"):
        called(tmp_path, "def score(completions, **kwargs): return {0.0, 1.0}", SAMPLES[:2])


def test_a_dict_without_a_score_is_told_by_its_fields(tmp_path: Path) -> None:
    source = "def score(solution_str, ground_truth): return {'reward': 1.0, 'acc': 1}"
    ((_, message, _),) = called(tmp_path, source, SAMPLES[:1])
    assert message == "TypeError: the reward is dict with reward, acc, wanted a number"
