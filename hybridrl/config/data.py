"""Where prompts and answers come from."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hybridrl.config.bounds import bounded

# OmegaConf's mark of a setting without a default, written out: ranks on a bare machine lack it.
MISSING: Any = "???"


class SourceKind(Enum):
    """Readers of a source."""

    reasoning_gym = "reasoning_gym"
    jsonl = "jsonl"
    parquet = "parquet"
    huggingface = "huggingface"
    function = "function"  # a user's generator by dotted path


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """One source of questions; several sources make a mixture."""

    kind: SourceKind = SourceKind.reasoning_gym
    """Its reader."""
    name: str = MISSING
    """reasoning_gym: the dataset's name; function: `package.module:name` or `/path/file.py:name`;
    otherwise a path, or a dataset's hub name."""
    params: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym, function: its parameters; huggingface: keywords of `load_dataset`."""
    split: str = "train"
    """huggingface: which split."""
    prompt_column: str = "prompt"
    """jsonl, parquet, huggingface: the column with the question (text, or a list of messages)."""
    answer_column: str = "answer"
    """jsonl, parquet, huggingface: the column with the expected answer."""
    answer_pattern: str | None = None
    """jsonl, parquet, huggingface: regular expression; the answer is the first group of its last
    match in the column. Null: all of it."""
    task_column: str | None = None
    """A column that names a row's task: metrics are by task, too. A dot leads into a field."""
    weight: float = bounded(1.0, above=0)
    """Share of this source in the mixture, relative to the others."""


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The prompts, their templates and the held-out part."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    """The mixture, by a name of your choice."""
    size: int = bounded(5000, least=1, allowed="a whole number of 1 or more")
    """Training items to draw from generated sources; file sources give all they have."""
    eval_size: int = bounded(256, least=1, allowed="a whole number of 1 or more")
    """Items held out from training, for evaluation."""
    seed: int = 0
    """Seed of generation, hold-out and shuffling."""
    prompt_template: str = "{question}"
    """Text of the prompt; `{question}`, `{answer}` and the item's own fields may stand in it."""
    answer_template: str = "{answer}"
    """Text of the target that supervised training learns; same fields."""
    chat: bool = False
    """Wrap the prompt into the tokenizer's chat template."""
    system_prompt: str | None = None
    """System message of the chat template."""
    keep: str | None = None
    """Regular expression; only items whose whole prompt matches it are used."""
    max_prompt_tokens: int = bounded(256, least=1, allowed="a whole number of 1 or more")
    """A longer prompt is an error, unless `skip_long_prompts`."""
    skip_long_prompts: bool = False
    """Leave prompts that are too long out (their number is reported) instead of stopping."""
