"""Checks a reward model, and makes a random one; `workers.scorers.NeuralReward` runs it."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from hybridrl.config import Config, ConfigError
from hybridrl.engines.probe import check_model
from hybridrl.models.context import context_tokens
from hybridrl.models.load import check_supported, load_config
from hybridrl.models.parallel import check_gen_layout, num_experts
from hybridrl.models.stored_weights import check_stored
from hybridrl.models.weight_files import weight_files

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def check_reward_model(
    config: Config, actor_path: str, tokenizer: PreTrainedTokenizerBase, role: str = "reward"
) -> None:
    """Raise ConfigError for a model that cannot judge as `role`.

    It must be a sequence classifier with one label that reads the actor's tokens, up to the longest
    sample, in the generation layout.
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
    check_reads_samples(config, path, model, actor_path, tokenizer, key)
    check_stored(path, model, classifier=True, key=key)


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
    longest = config.longest_generated
    if context_tokens(model) < longest:
        room = f"its context is {context_tokens(model)}"
        raise ConfigError(key, path, f"room for {longest} tokens, prompt and response ({room})")
    check_tokenizer(path, tokenizer, key)


def check_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Raise ConfigError if a token of `tokenizer` has another id in the one at `path`.

    The error names `key`. A directory without a tokenizer is not checked.
    """
    directory = Path(path)
    if directory.is_dir() and not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return
    try:
        other = AutoTokenizer.from_pretrained(path, local_files_only=directory.exists()).get_vocab()
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(key, path, f"a tokenizer that can be read ({reason})") from None
    for token, id in sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1]):
        if other.get(token) != id:
            ids = f"{token!r} is {id} for the actor, {other.get(token, 'unknown')} here"
            raise ConfigError(key, path, f"the actor's tokenizer ({ids})")


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
