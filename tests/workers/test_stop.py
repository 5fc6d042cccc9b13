"""What `rollout.stop` comes to: tokens of the vocabulary, and texts that are not."""

import pytest

from hybridrl.config import Config, ConfigError, RolloutConfig
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.workers.actor import stop_strings, stop_token_ids

TOKENIZER = make_char_tokenizer("abc .", 64)


def test_a_token_by_its_id_and_any_other_text_by_its_letters() -> None:
    stop = ["c", "<pad>", ". ", "ab"]
    ids = {TOKENIZER.convert_tokens_to_ids(text) for text in ("<eos>", "c", "<pad>")}
    assert set(stop_token_ids(TOKENIZER, False, stop)) == ids
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
