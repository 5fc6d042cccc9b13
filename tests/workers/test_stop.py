"""What texts in the settings of sampling come to: tokens of the vocabulary, or not."""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybridrl.config import Config, ConfigError, RolloutConfig
from hybridrl.flow.executor import Sampling
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.workers.sampling import SamplingTexts, bad_word_ids, stop_strings

TOKENIZER = make_char_tokenizer("abc .", 64)


def test_a_token_by_its_id_and_any_other_text_by_its_letters() -> None:
    stop = ["c", "<pad>", ". ", "ab"]
    ids = {TOKENIZER.convert_tokens_to_ids(text) for text in ("<eos>", "c", "<pad>")}
    texts = SamplingTexts(TOKENIZER, False, stop)
    assert set(texts.params(Sampling(9)).stop_token_ids) == ids
    ignoring = texts.params(Sampling(9, ignore_eos=True))
    assert set(ignoring.stop_token_ids) == ids - {TOKENIZER.eos_token_id}
    assert ignoring.ignored_stop_ids == (TOKENIZER.eos_token_id,)
    strings = stop_strings(TOKENIZER, stop)
    assert strings is not None
    for text, ends in (("b", False), ("bab", True), ("a.b", False), ("b. ", True), ("cc", False)):
        assert strings.ended(TOKENIZER.encode(text)) == ends
    # A special token is part of the text, so that a tail is enough whatever tokens there are.
    between = [*TOKENIZER.encode("a"), TOKENIZER.pad_token_id, *TOKENIZER.encode("b")]
    assert not strings.ended(between)
    assert stop_strings(TOKENIZER, ["c", "<pad>"]) is None


def test_wrong_texts() -> None:
    with pytest.raises(ConfigError, match=r"^rollout\.stop=ax: wanted a text that the model's"):
        stop_strings(TOKENIZER, ["ab", "ax"])
    with pytest.raises(ConfigError, match=r"^rollout\.stop=\['a', ''\]: wanted texts of one or"):
        Config(rollout=RolloutConfig(stop=["a", ""]))


def test_bad_words_are_the_tokens_that_vllm_makes_of_them() -> None:
    """At the start of a text; behind a space too, where another token then begins it."""
    a, b = TOKENIZER.encode("ab", add_special_tokens=False)
    assert bad_word_ids(TOKENIZER, ["ab", " a"]) == ((a, b), (a,))
    assert bad_word_ids(TOKENIZER, []) == ()
    words = Tokenizer(
        models.WordLevel({"<unk>": 0, "the": 1, " the": 2, " ": 3}, unk_token="<unk>")
    )
    words.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w+"), "isolated")
    pieces = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    assert bad_word_ids(pieces, ["the"]) == ((1,), (2,))
    with pytest.raises(ConfigError, match=r"^eval\.sets\.x\.bad_words=ax: wanted a text that the"):
        bad_word_ids(TOKENIZER, ["ab", "ax"], "eval.sets.x.bad_words")
