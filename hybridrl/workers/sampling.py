"""From settings of sampling to what engines take: texts become tokens of the model's vocabulary."""

from collections.abc import Iterable, Sequence
from functools import partial

from transformers import PreTrainedTokenizerBase

from hybridrl.config import ConfigError
from hybridrl.data import end_token_id
from hybridrl.engines.rollout.interface import SamplingParams
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.flow.executor import Sampling


class SamplingTexts:
    """What the run's tokenizer makes of the texts in `Sampling`."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        chat: bool,
        stop: Sequence[str],
        ends: Iterable[int] = (),
    ) -> None:
        """`ends` are those of the model's files; the tokenizer's and template's come with them."""
        self._tokenizer = tokenizer
        self._stop_ids = named_token_ids(tokenizer, stop)
        end = end_token_id(tokenizer, chat)
        self.end_ids: set[int] = {tokenizer.eos_token_id, end, *ends} - {None}
        """Tokens that end a response, without those of `rollout.stop`."""
        self.all_end_ids = (end, *sorted((self.end_ids | self._stop_ids) - {end}))
        """All tokens that end a response or a turn, the one that is trained as the end first."""
        self._params: dict[Sampling, SamplingParams] = {}

    def params(self, sampling: Sampling) -> SamplingParams:
        """The engine's parameters."""
        if sampling not in self._params:
            self._params[sampling] = self._make(sampling)
        return self._params[sampling]

    def _make(self, sampling: Sampling) -> SamplingParams:
        ignored = self.end_ids - self._stop_ids if sampling.ignore_eos else set[int]()
        return SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            stop_token_ids=tuple(sorted((self._stop_ids | self.end_ids) - ignored)),
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            min_new_tokens=sampling.min_new_tokens,
            logit_bias=sampling.logit_bias,
            bad_words=bad_word_ids(self._tokenizer, sampling.bad_words),
            ignored_stop_ids=tuple(sorted(ignored)),
            max_turn_tokens=sampling.max_turn_tokens,
            keeps_ids=sampling.keeps_ids and sampling.truncates,
        )


def named_token_ids(tokenizer: PreTrainedTokenizerBase, stop: Sequence[str]) -> set[int]:
    """The tokens of the vocabulary that `rollout.stop` names."""
    return {id for text in stop if (id := _token_id(tokenizer, text)) is not None}


def stop_strings(
    tokenizer: PreTrainedTokenizerBase, stop: Sequence[str], key: str = "rollout.stop"
) -> StopStrings | None:
    """The texts of `rollout.stop`, or of another `key`, that are no tokens; None if all are.

    Raises `ConfigError` for a text that no tokens of the vocabulary make.
    """
    texts = [text for text in stop if _token_id(tokenizer, text) is None]
    _check_texts(tokenizer, texts, key)
    return text_stops(tokenizer, texts) if texts else None


def text_stops(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> StopStrings:
    """What ends a response by these texts, tokens of the vocabulary too, none of them empty."""
    return StopStrings(partial(_decode, tokenizer), texts)


def bad_word_ids(
    tokenizer: PreTrainedTokenizerBase, words: Iterable[str], key: str = "rollout.bad_words"
) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, as at the start of a text and, where it is as long, behind a space.

    These are vLLM's (`SamplingParams.update_from_tokenizer`). Raises `ConfigError`, which names
    `key`, for a word that no tokens of the vocabulary make.
    """
    words = list(words)
    _check_texts(tokenizer, words, key)
    sequences = list[tuple[int, ...]]()
    for word in words:
        text = word.lstrip()
        alone, behind = (
            tuple(tokenizer.encode(prefix + text, add_special_tokens=False)) for prefix in ("", " ")
        )
        sequences.append(alone)
        if behind and behind[0] != alone[0] and len(behind) == len(alone):
            sequences.append(behind)
    return tuple(dict.fromkeys(sequences))


def _check_texts(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], key: str) -> None:
    """Raise for a text that the vocabulary cannot make, but for the spaces around it.

    Tokenizers may add or drop those.
    """
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if text.strip() not in _decode(tokenizer, ids):
            raise ConfigError(key, text, "a text that the model's vocabulary can make")


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


def _token_id(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    token: int | None = tokenizer.convert_tokens_to_ids(text)
    return None if token == tokenizer.unk_token_id else token
