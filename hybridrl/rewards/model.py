"""Checks a reward model, and makes a random one; `workers.scorers.NeuralReward` runs it."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from hybridrl.config import Config, ConfigError
from hybridrl.engines.probe import check_model
from hybridrl.models.context import context_tokens
from hybridrl.models.control_tokens import ControlTokens
from hybridrl.models.load import check_supported, load_config
from hybridrl.models.parallel import check_gen_layout, num_experts
from hybridrl.models.response_text import MARKER
from hybridrl.models.stored_weights import check_stored
from hybridrl.models.weight_files import weight_files

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_reward_model(
    config: Config, actor_path: str, tokenizer: PreTrainedTokenizerBase, role: str = "reward"
) -> None:
    """Raise ConfigError for a model that cannot judge as `role`.

    It must be a sequence classifier with one label, in the generation layout. It reads the actor's
    tokens, up to the longest sample, or with another tokenizer the text of prompt and response.
    """
    path, key = str(config.judge_of(role).model), f"{role}.model"

    def refused(allowed: str) -> ConfigError:
        return ConfigError(key, path, allowed.replace("\n", " "))

    if path.startswith(("/", ".")) and not Path(path).is_dir():
        raise refused("a directory that exists, or a hub name")
    try:
        model = load_config(path, key)
        check_supported(model)
        check_model(model, key, train=True, native=True)
        gen = config.rollout.layout
        ep = gen.ep if num_experts(model) else 1
        check_gen_layout(model, gen.pp, gen.tp, ep)
        names = weight_files(path)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise refused(f"a model with *.safetensors that can be read ({error})") from None
    heads = [name for name in model.architectures or [] if "SequenceClassification" in name]
    if not heads or "score.weight" not in names:
        architectures = ", ".join(model.architectures or ["no architecture"])
        raise refused(f"a sequence classifier with its head `score` (found {architectures})")
    if model.num_labels != 1:
        raise refused(f"a classifier with one label (num_labels is {model.num_labels})")
    if difference := other_token(path, tokenizer, key):
        check_reads_text(config, path, key, difference)
    else:
        check_reads_samples(config, path, model, actor_path, tokenizer, key)
    check_stored(path, model, classifier=True, key=key)


def check_reads_text(config: Config, path: str, key: str, difference: str) -> None:
    """Raise ConfigError if the model at `path`, of another tokenizer, cannot read responses."""
    if config.environment.is_on:
        allowed = f"the actor's tokenizer, with an environment ({difference})"
        raise ConfigError(key, path, allowed)
    try:
        reader = TextReader(path)
        messages = [{"role": "user", "content": "Q"}] if config.data.chat else []
        if messages and config.data.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": config.data.system_prompt})
        reader.ids(messages, "Q", "A")
    except ValueError as error:
        allowed = f"the actor's tokenizer, or one that can read the text ({error}; {difference})"
        raise ConfigError(key, path, allowed) from None
    logger.info("%s=%s reads responses as text: %s", key, path, difference)


class TextReader:
    """Reads prompt and response by their text: with the model's own tokenizer and chat template.

    A text that spells one of its control tokens stays text, but for the markers of thoughts and
    calls in a response. So no response can end its turn and praise itself.
    """

    def __init__(self, path: str) -> None:
        here = Path(path).exists()
        self.tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=here)
        config = AutoConfig.from_pretrained(path, local_files_only=here)
        self.room, self.vocab_size = context_tokens(config), config.vocab_size
        self.control = ControlTokens(self.tokenizer)
        self._structure = {x for x in self.control.spellings if not MARKER.search(x)}

    def ids(self, messages: Sequence[Any], prompt: str, response: str) -> list[int]:
        """The tokens of a response to `messages`, or without any to the text `prompt`.

        With a chat template a `prompt` is the user's message; without one it comes before the
        response as it is. Raises ValueError, with the reason, where the model cannot read it.
        """
        if self.tokenizer.chat_template is None:
            if messages:
                raise ValueError("its tokenizer has no chat template, for data.chat=true")
            ids = self._plain(self.control.guard(prompt + response, self._structure))
        else:
            asked = self.control.guard(messages or [{"role": "user", "content": prompt}])
            content = self.control.guard(response, self._structure)
            answer = {"role": "assistant", "content": content}
            try:
                text = self.tokenizer.apply_chat_template([*asked, answer], tokenize=False)
            except Exception as error:  # templates raise their errors in jinja's classes
                reason = " ".join(str(error).split())[:200]
                raise ValueError(f"its chat template refuses the messages: {reason}") from error
            options = {"add_special_tokens": False, "verbose": False}
            (ids,) = self.control.ids([text], lambda x: self.tokenizer(x, **options)["input_ids"])
        if len(ids) > self.room:
            raise ValueError(f"{len(ids)} tokens, and its context is {self.room}")
        if not ids:
            raise ValueError("no token")
        if max(ids) >= self.vocab_size:
            raise ValueError(f"token {max(ids)}, and its vocabulary has {self.vocab_size}")
        return list(ids)

    def _plain(self, text: str) -> list[int]:
        """The tokens of a text, between those that the tokenizer adds of its own."""
        options = {"add_special_tokens": False, "verbose": False}
        bare = self.control.plain(text)
        whole = self.tokenizer(bare, verbose=False)["input_ids"]
        within = self.tokenizer(bare, **options)["input_ids"]
        (ids,) = self.control.ids([text], lambda x: self.tokenizer(x, **options)["input_ids"])
        added = range(len(whole) - len(within) + 1)
        first = next(i for i in added if whole[i : i + len(within)] == within)
        return [*whole[:first], *ids, *whole[first + len(within) :]]


def check_reads_samples(
    config: Config,
    path: str,
    model: PretrainedConfig,
    actor_path: str,
    tokenizer: PreTrainedTokenizerBase,
    key: str,
) -> None:
    """Raise ConfigError if `model`, at `path`, cannot read the actor's samples."""
    actor = load_config(actor_path)
    if model.vocab_size < actor.vocab_size:
        sizes = f"{model.vocab_size}, the actor {actor.vocab_size}"
        raise ConfigError(key, path, f"the actor's vocabulary (it has {sizes} tokens)")
    if not _has_tokenizer(path):
        if model.vocab_size != actor.vocab_size:
            sizes = f"it has {model.vocab_size} tokens, the actor {actor.vocab_size}"
            raise ConfigError(key, path, f"a directory with a tokenizer ({sizes})")
        logger.warning("%s=%s has no tokenizer: it is given the actor's tokens", key, path)
    longest = config.longest_generated
    if context_tokens(model) < longest:
        room = f"its context is {context_tokens(model)}"
        raise ConfigError(key, path, f"room for {longest} tokens, prompt and response ({room})")
    check_tokenizer(path, tokenizer, key)


def check_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Raise ConfigError, which names `key`, where the tokenizer at `path` is another one."""
    if difference := other_token(path, tokenizer, key):
        raise ConfigError(key, path, f"the actor's tokenizer ({difference})")


def other_token(path: str, tokenizer: PreTrainedTokenizerBase, key: str) -> str:
    """A token of `tokenizer` that has another id in the one at `path`; empty where none has.

    Raises ConfigError, which names `key`, for a tokenizer that cannot be read. A directory without
    one is taken to have the same.
    """
    if not _has_tokenizer(path):
        return ""
    try:
        here = Path(path).exists()
        other = AutoTokenizer.from_pretrained(path, local_files_only=here).get_vocab()
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(key, path, f"a tokenizer that can be read ({reason})") from None
    for token, id in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if other.get(token) != id:
            return f"{token!r} is {id} for the actor, {other.get(token, 'unknown')} here"
    return ""


def _has_tokenizer(path: str) -> bool:
    """Whether a directory has a tokenizer's files; those of a hub's model are not looked for."""
    directory = Path(path)
    return not directory.is_dir() or any((directory / x).exists() for x in _TOKENIZER_FILES)


def make_reward_model(path: str | Path, actor_path: str, seed: int) -> None:
    """Write a reward model of the actor's shape with random weights, and its tokenizer, to `path`.

    The same `seed` gives the same weights, bit for bit; the caller's random state is unchanged.
    """
    config = load_config(actor_path)
    config.num_labels, config.architectures = 1, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(actor_path).save_pretrained(path)
