"""Where prompts and answers come from."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError

# OmegaConf's mark of a setting without a default, written out: ranks on a bare machine lack it.
MISSING: Any = "???"


class SourceKind(Enum):
    """Readers of a source."""

    reasoning_gym = "reasoning_gym"
    jsonl = "jsonl"  # or one array of objects
    csv = "csv"  # with a header; all values are text
    parquet = "parquet"
    huggingface = "huggingface"
    function = "function"  # a user's generator by dotted path


@dataclass(kw_only=True, slots=True)
class SourceConfig:
    """One source of questions; several sources make a mixture."""

    kind: SourceKind = SourceKind.reasoning_gym
    """Its reader."""
    name: Any = MISSING
    """reasoning_gym: the dataset's name; function: `package.module:name` or `/path/file.py:name`;
    huggingface: a folder, or a dataset's hub name. The other kinds: a file, a pattern with `*`, a
    folder, or a list of these. Names of files may end with .gz, .zst, .bz2 or .lz4."""
    params: dict[str, Any] = field(default_factory=dict)
    """reasoning_gym, function: its parameters; huggingface: keywords of `load_dataset`."""
    split: str = "train"
    """huggingface: which split."""
    prompt_column: str | None = "prompt"
    """jsonl, csv, parquet, huggingface: the column with the question (text, or a list of
    messages). In all names of columns a dot leads into a field: `reward_model.ground_truth`. Null:
    rows have none. It is what their `chosen` and `rejected` begin with alike, or else the answer is
    a whole text."""
    answer_column: str | None = "answer"
    """jsonl, csv, parquet, huggingface: the column with the expected answer. A list has several
    right ones. Null: the rows have none, as a judge that grades responses needs none."""
    messages_column: str | None = None
    """jsonl, parquet, huggingface: the column with whole conversations, lists of messages, in place
    of prompt and answer. Supervised training learns the assistant's turns; the prompt is all before
    the first of them, which is the answer."""
    tools_column: str | None = None
    """jsonl, parquet, huggingface: the column with a row's tools for the chat template, a list of
    JSON schemas or its text."""
    answer_pattern: str | None = None
    """jsonl, csv, parquet, huggingface: regular expression; the answer is the first group of its
    last match in the column. Null: all of it."""
    task_column: str | None = None
    """A column that names a row's task: metrics are by task, too. A dot leads into a field."""
    weight: float = bounded(1.0, above=0)
    """Share of this source in the mixture, relative to the others."""


@dataclass(kw_only=True, slots=True)
class CurriculumConfig:
    """Pools of prompts by solve rate, the share of a prompt's samples that are right.

    With both rests 0 every prompt is drawn in every epoch of its source.
    """

    easy_rest: int = bounded(0, least=0)
    """Epochs that a prompt rests whose samples are right."""
    hard_rest: int = bounded(0, least=0)
    """Epochs that a prompt rests whose samples are wrong."""
    easy_threshold: float = bounded(1.0, above=0, most=1)
    """A prompt is easy at this solve rate or above."""
    hard_threshold: float = bounded(0.0, least=0, below=1)
    """A prompt is hard at this solve rate or below."""
    success_threshold: float = 1.0
    """A sample counts as right when its reward reaches this."""

    @property
    def rests(self) -> bool:
        """Whether any prompt ever rests."""
        return self.easy_rest > 0 or self.hard_rest > 0

    def check(self) -> None:
        """Raise ConfigError for thresholds that no solve rate is between."""
        if self.hard_threshold >= self.easy_threshold:
            allowed = f"below data.curriculum.easy_threshold={self.easy_threshold:g}"
            raise ConfigError("data.curriculum.hard_threshold", self.hard_threshold, allowed)


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
    privileged_template: str | None = None
    """Text of a prompt with more than the model is asked with, such as the answer; same fields. A
    recipe of self-distillation lets a teacher read it in place of the prompt."""
    chat: bool = False
    """Wrap the prompt into the tokenizer's chat template."""
    chat_template: str | None = None
    """A file with a chat template, or its text (Jinja), in place of the tokenizer's. It is saved
    with the model."""
    system_prompt: str | None = None
    """System message of the chat template."""
    keep: str | None = None
    """Regular expression; only items whose whole prompt matches it are used."""
    max_prompt_tokens: int = bounded(256, least=1, allowed="a whole number of 1 or more")
    """A longer prompt is an error, unless `skip_unusable_rows`."""
    curriculum: CurriculumConfig = field(default_factory=CurriculumConfig)
    """Which prompts rest, by their solve rate."""
    skip_unusable_rows: bool = False
    """Leave rows out that cannot be used, and report their number, instead of stopping. A prompt or
    an answer is missing, empty or too long, a pair does not differ, or a text has half a surrogate
    pair."""
