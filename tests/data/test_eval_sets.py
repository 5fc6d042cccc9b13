"""Evaluation sets with their own prompts; those of papers, on small files of their columns."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from hybridrl.config import ConfigError, DataConfig, EvalSetConfig, SourceConfig, SourceKind
from hybridrl.config.compose import check, register
from hybridrl.data import Data, Item, load_eval_set, mixture_parts
from hybridrl.rewards.results import RewardInput
from hybridrl.rewards.worker import make_verifier

ROOT = Path(__file__).parents[2]
PAPERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "math500": ({"problem": "1 + 1?", "answer": "2", "level": 1}, "2", r"\boxed{2}"),
    "gsm8k": ({"question": "6 and 7?", "answer": "6*7=42\n#### 42"}, "42", r"it is \boxed{42}"),
    "aime24": ({"problem": "What is it?", "answer": "073"}, "073", r"\boxed{73}"),
    "aime25": ({"problem": "What is it?", "answer": "73"}, "73", r"\boxed{73}"),
    "amc23": ({"question": "How many?", "answer": "27.0"}, "27.0", r"\boxed{27}"),
    "gpqa_diamond": (
        {
            "Question": "Which?",
            "Correct Answer": "right",
            "Incorrect Answer 1": "x",
            "Incorrect Answer 2": "y",
            "Incorrect Answer 3": "z",
        },
        "",
        "",
    ),
}  # fmt: skip
"""A row of each paper's columns, its answer, and a right response."""


def load(settings: EvalSetConfig, tokenizer: Any, **data: Any) -> list[Item]:
    config = DataConfig(**{"size": 20, "eval_size": 10, "max_prompt_tokens": 400, **data})
    return load_eval_set("own", settings, config, tokenizer, max_context=1024, max_new_tokens=24)


def numbers(jsonl: Callable[..., str], count: int = 8) -> SourceConfig:
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(count)]
    return SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows))


def test_papers_are_all_here():
    assert {path.stem for path in (ROOT / "conf/eval/sets").glob("*.yaml")} == set(PAPERS)


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_set_reads_its_columns_and_judges(name: str, tokenizer: Any, tmp_path: Path):
    row, answer, response = PAPERS[name]
    datasets.Dataset.from_list([row]).to_parquet(tmp_path / "train.parquet")
    register()
    key = f"eval.sets.{name}.source"
    config = check([f"eval/sets=[{name}]", f"{key}.split=train", *place(key, name, tmp_path)])
    settings = config.eval.sets[name]
    (item,) = load(settings, tokenizer)
    verify = make_verifier(config.judge_of(config.judge_of_set(name)))
    if name == "gpqa_diamond":
        assert f"{item.answer}) right" in item.prompt
        answer, response = item.answer, f"so x.\nAnswer: {item.answer}"
    assert item.answer == answer
    asked = next(value for key, value in row.items() if key.lower() in ("problem", "question"))
    assert item.prompt.startswith(asked)
    assert item.prompt != asked
    assert verify(RewardInput(item.prompt, response, item.answer))[0] == 1
    assert verify(RewardInput(item.prompt, "I do not know", item.answer))[0] == 0


def place(key: str, name: str, folder: Path) -> list[str]:
    """Overrides that read a copy in `folder`; the dataset's parts there have no names."""
    if name == "gpqa_diamond":
        return [f"{key}.params={{dataset: '{folder}'}}", f"~{key}.params.name"]
    return (
        [f"{key}.name='{folder}'", f"~{key}.params.name"]
        if name == "gsm8k"
        else [f"{key}.name='{folder}'"]
    )


def test_gpqas_choices_are_shuffled_by_the_seed(tokenizer: Any, tmp_path: Path):
    row = PAPERS["gpqa_diamond"][0]
    rows = [row | {"Question": f"Which of {n}?"} for n in range(20)]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "train.parquet")
    source = SourceConfig(
        kind=SourceKind.function,
        name="hybridrl.data.papers:gpqa",
        params={"dataset": str(tmp_path)},
    )
    answers = [
        [
            item.answer
            for item in load(EvalSetConfig(source=source, num_prompts=20), tokenizer, seed=s)
        ]
        for s in (0, 0, 1)
    ]
    assert set(answers[0]) == set("ABCD")
    assert answers[0] == answers[1] != answers[2]


def test_a_template_and_a_number_of_its_own(jsonl: Callable[..., str], tokenizer: Any):
    settings = EvalSetConfig(source=numbers(jsonl), prompt_template="Q {question}", num_prompts=3)
    items = load(settings, tokenizer, keep="nothing of training matches")
    assert [item.prompt for item in items] == ["Q 0?", "Q 1?", "Q 2?"]
    assert {item.source for item in items} == {"eval.sets.own"}


def test_training_gets_none_of_its_prompts(jsonl: Callable[..., str], load: Callable[..., Data]):
    data = load(numbers(jsonl, 20), eval_size=2, reserved={"3?", "7?"})
    prompts = {item.prompt for item in data.train + data.eval}
    assert prompts == {f"{n}?" for n in range(20)} - {"3?", "7?"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "/none.jsonl"}, "eval.sets.own.source.name=/none.jsonl: wanted a jsonl file"),
        ({"prompt_column": "q"}, "eval.sets.own.source.prompt_column=q: wanted one of "),
        ({"answer_pattern": "x(.*)"}, "eval.sets.own.source.answer_pattern=x(.*): wanted an expr"),
        ({"answer_pattern": "("}, "eval.sets.own.source.answer_pattern=(: wanted a regular"),
    ],
)
def test_errors_name_the_key(settings, message, jsonl: Callable[..., str], tokenizer: Any):
    source = numbers(jsonl)
    for key, value in settings.items():
        setattr(source, key, value)
    with pytest.raises(ConfigError) as caught:
        load(EvalSetConfig(source=source), tokenizer)
    assert str(caught.value).startswith(message)


def test_a_template_with_an_unknown_field_names_the_sets_key(
    jsonl: Callable[..., str], tokenizer: Any
):
    with pytest.raises(ConfigError, match=r"^eval.sets.own.prompt_template=\{x\}: wanted fields"):
        load(EvalSetConfig(source=numbers(jsonl), prompt_template="{x}"), tokenizer)


def test_a_set_without_a_prompt_is_refused(tokenizer: Any, tmp_path: Path):
    (tmp_path / "none.jsonl").write_text("\n")
    source = SourceConfig(kind=SourceKind.jsonl, name=str(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"^eval.sets.own.source.name=.*at least one row"):
        load(EvalSetConfig(source=source), tokenizer)


def test_parts_of_a_mixture():
    row = {"kind": {"level": "hard"}}
    item = Item("p", (1,), "a", (2,), "one", row)
    config = DataConfig(sources={"one": SourceConfig(name="x", task_column="kind.level")})
    assert mixture_parts(config, item) == ["task/hard"]
    config.sources["two"] = SourceConfig(name="y")
    assert mixture_parts(config, item) == ["source/one", "task/hard"]
    config.sources["one"].task_column = None
    assert mixture_parts(config, item) == ["source/one"]
