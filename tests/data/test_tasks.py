"""Generated tasks of our own, as `kind: function` sources."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.data import Data
from hybridrl.data.tasks import spell_hints, spell_preferences, work

Load = Callable[..., Data]


def test_work_has_the_wanted_tail() -> None:
    rows = list(itertools.islice(work(seed=0), 20_000))
    counts = [row["num_steps"] for row in rows]
    median, tail = np.percentile(counts, [50, 99])
    assert median == pytest.approx(10, abs=1)
    assert 7 < tail / median < 9.5
    assert max(counts) == 99
    for row in rows[:50]:
        letters, count = re.fullmatch(r"([a-z]{3})(\d+)", row["question"]).groups()
        assert row["answer"] == letters
        assert row["steps"] == ",".join(map(str, range(int(count), 0, -1)))


def test_a_function_in_a_file(load: Load, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def rows(seed, stop):\n"
        "    for n in range(seed, stop):\n"
        "        yield {'question': f'{n}?', 'answer': n, 'double': 2 * n}\n"
    )
    source = SourceConfig(
        kind=SourceKind.function, name=f"{path}:rows", params={"stop": 40, "seed": 3}
    )
    data = load(source, prompt_template="{question} {double}")
    assert len(data.train) + len(data.eval) == 37  # it ends, so that is all there is
    assert data.eval[0].prompt == "3? 6"


@pytest.mark.parametrize(
    ("name", "params", "key"),
    [
        ("hybridrl.data.tasks:nothing", {}, "data.sources.s.name"),
        ("nothing", {}, "data.sources.s.name"),
        ("hybridrl.data.tasks:work", {"maximum": 3}, "data.sources.s.params"),
        ("{file}:picky", {"least": 0}, "data.sources.s.params"),
        ("itertools:count", {"seed": 0}, "data.sources.s.params"),
        ("{file}:bare", {}, "data.sources.s.name"),
    ],
)
def test_a_function_that_cannot_serve_is_named(
    load: Load, tmp_path: Path, name: str, params: dict[str, Any], key: str
) -> None:
    (tmp_path / "bare.py").write_text(
        "def bare(seed):\n    yield {'question': 'x'}\n"
        "def picky(seed, least):\n    raise ValueError('wanted 1 or more')\n    yield\n"
    )
    source = SourceConfig(
        kind=SourceKind.function, name=name.format(file=tmp_path / "bare.py"), params=params
    )
    with pytest.raises(ConfigError) as caught:
        load(source)
    assert caught.value.key == key
    assert "\n" not in str(caught.value)


def test_preferences_have_one_mistake(load: Load, tokenizer: Any) -> None:
    """The words of reasoning_gym; every rejected response within one change of the chosen one."""
    rows = list(itertools.islice(spell_preferences(seed=0), 400))
    plain = reasoning_gym.create_dataset("spell_backward", seed=0, size=400, min_word_len=3,
                                         max_word_len=8)  # fmt: skip
    assert [row["question"] for row in rows] == [row["question"] for row in plain]
    kinds = set()
    for row in rows:
        right, wrong = row["chosen"].removeprefix("#"), row["rejected"].removeprefix("#")
        assert row["word"][::-1] == right == row["answer"]
        assert wrong != right
        assert abs(len(wrong) - len(right)) <= 1
        differ = [i for i, (a, b) in enumerate(zip(right, wrong, strict=False)) if a != b]
        kinds.add((len(wrong) - len(right), len(differ) if len(wrong) == len(right) else 0))
        if len(wrong) == len(right):
            assert len(differ) <= 2
    assert kinds == {(0, 1), (0, 2), (-1, 0), (1, 0)}


def test_responses_of_columns_are_tokens(load: Load, tokenizer: Any, jsonl: Any) -> None:
    rows = [
        {
            "prompt": f"{n}?",
            "answer": "yes",
            "chosen": f"yes{n}",
            "rejected": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "no"}],
        }
        for n in range(30)
    ]
    source = SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows))
    data = load(source, columns=("chosen", "rejected"))
    for item in data.train:
        number = item.prompt.removesuffix("?")
        texts = {name: tokenizer.decode(ids) for name, ids in item.columns.items()}
        assert texts == {"chosen": f"yes{number}<eos>", "rejected": "no<eos>"}
    assert data.longest == max(len(i.prompt_ids) + len(i.columns["chosen"]) for i in data.train)
    with pytest.raises(
        ConfigError, match=r"data\.sources\.s=.*wanted rows whose 'worse' is a resp"
    ):
        load(source, columns=("worse",))


def test_hints_are_before_half_of_the_words() -> None:
    rows = list(itertools.islice(spell_hints(seed=3, hinted=0.5), 400))
    hinted = [row for row in rows if row["hint"] == "yes"]
    assert 150 < len(hinted) < 250
    for row in rows:
        word, answer = row["word"], row["answer"]
        assert answer == word[::-1]
        assert row["told"] == f"{answer}>{word}:"
        assert row["asked"] == (row["told"] if row["hint"] == "yes" else f"{word}:")
    assert rows[:9] == list(itertools.islice(spell_hints(seed=3, hinted=0.5), 9))


def test_privileged_prompts(load: Load, tokenizer: Any) -> None:
    """Another template over the same row; the prompts stay; both are bounded."""
    task = "hybridrl.data.tasks:spell_hints"
    source = SourceConfig(kind=SourceKind.function, name=task, params={"hinted": 0.0})
    settings: dict[str, Any] = {
        "prompt_template": "{asked}", "privileged_template": "{answer} is {word} backward",
    }  # fmt: skip
    data = load(source, **settings)
    for item in data.train:
        word = item.item["word"]
        assert tokenizer.decode(item.privileged_ids) == f"{word[::-1]} is {word} backward"
        assert item.prompt == f"{word}:"
        assert tokenizer.decode(item.prompt_ids) == item.prompt
    with pytest.raises(ConfigError, match=r"data\.max_prompt_tokens=12: wanted \d\d or more"):
        load(source, max_prompt_tokens=12, **settings)
    with pytest.raises(
        ConfigError, match=r"data\.privileged_template=\{hint\[x\]\}: wanted fields"
    ):
        load(source, prompt_template="{asked}", privileged_template="{hint[x]}")
    assert not load(source, prompt_template="{asked}").train[0].privileged_ids


def test_a_privileged_prompt_of_messages(load: Load, jsonl: Any, chat_tokenizer: Any) -> None:
    """It fills the last message, as the prompt template does."""
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = [
        {"prompt": [*turns, {"role": "user", "content": f"{n}?"}], "answer": str(n)}
        for n in range(30)
    ]
    data = load(
        SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows)),
        tokenizer=chat_tokenizer, chat=True, privileged_template="{question} ({answer})",
    )  # fmt: skip
    item = data.train[0]
    start = "<user>hi<eos>\n<assistant>hello<eos>\n<user>"
    assert item.prompt == f"{start}{item.answer}?<eos>\n<assistant>"
    told = chat_tokenizer.decode(item.privileged_ids)
    assert told == f"{start}{item.answer}? ({item.answer})<eos>\n<assistant>"
