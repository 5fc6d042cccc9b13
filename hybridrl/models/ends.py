"""The tokens that end what a model writes, as its files say."""

from collections.abc import Iterable
from typing import Any

from hybridrl.models.load import generation_config


def end_token_ids(path: str, config: Any) -> frozenset[int]:
    """All ends that `config.json` and `generation_config.json` name, within the vocabulary.

    Chat models have several: GLM ends at `<|endoftext|>`, `<|user|>` and `<|observation|>`, Llama
    at `<|eot_id|>` and `<|eom_id|>` besides the tokenizer's eos.
    """
    named = [config.eos_token_id, generation_config(path).eos_token_id]
    ids = {id for value in named for id in _ids(value)}
    return frozenset(id for id in ids if 0 <= id < config.vocab_size)


def _ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return tuple(map(int, value)) if isinstance(value, list | tuple) else (int(value),)
