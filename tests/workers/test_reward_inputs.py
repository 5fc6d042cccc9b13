"""What judges see of samples: of conversations the last turn, the messages, what was earned."""

from typing import Any

import torch
from tokenizers import AddedToken

from hybridrl.config import RewardConfig, RewardKind
from hybridrl.data import Item
from hybridrl.engines.rollout.interface import Turn
from hybridrl.flow.sample import SampleId
from hybridrl.models.response_text import ResponseText
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.rewards import JudgePool
from hybridrl.workers.roles import reward_inputs
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.turns import conversation_tensors

TOKENIZER = make_char_tokenizer("abcdefgh#?", 99)


def stored(
    response: str, turns: list[Turn], rewards: list[float], tokenizer: Any = TOKENIZER
) -> SampleStore:
    written = tokenizer(response)["input_ids"]
    ids = [*tokenizer("ab?")["input_ids"], *written]
    item = Item("ab?", (), "#f", (), "s", {"question": "ab"}, question="asked")
    tensors = {"tokens": torch.tensor(ids)}
    if turns:
        tensors |= conversation_tensors(turns, ids[:3], ids[3:], rewards)
    store = SampleStore()
    store.add(SampleId(0), StoredSample(len(written), item, tensors))
    return store


def test_a_conversation_is_told_apart() -> None:
    turns = [Turn(0, 2, "stop"), Turn(5, 6, "length"), Turn(7, 9, "stop")]
    store = stored("cdefgha#f", turns, [0.25, 0.0, 0.5])
    (seen,) = reward_inputs(store, ResponseText(TOKENIZER), [SampleId(0)])
    assert (seen.prompt, seen.response, seen.answer, seen.earned) == ("ab?", "#f", "#f", 0.75)
    assert (seen.item["question"], seen.asked) == ("ab", "asked")
    told = [(m["role"], m["content"]) for m in seen.item["conversation"]]
    assert told == [
        ("assistant", "cd"), ("environment", "efg"), ("assistant", "h"), ("environment", "a"),
        ("assistant", "#f"),
    ]  # fmt: skip
    for extract in (None, "nowhere"):  # what was earned does not follow from the text
        with JudgePool(RewardConfig(kind=RewardKind.environment, extract=extract)) as pool:
            assert [result.reward for result in pool.score([seen])] == [0.75]
    with JudgePool(RewardConfig(kind=RewardKind.exact)) as pool:
        assert [result.reward for result in pool.score([seen])] == [1.0]


def test_a_response_of_one_turn_is_as_ever() -> None:
    (seen,) = reward_inputs(stored("cd#f", [], []), ResponseText(TOKENIZER), [SampleId(0)])
    assert (seen.response, seen.earned, seen.item) == ("cd#f", None, {"question": "ab"})
    assert seen.asked == "asked"


def test_special_tokens_around_thoughts_are_seen() -> None:
    """In a response, and in the turns of a conversation."""
    tokenizer = make_char_tokenizer("abcdefgh#?", 99)
    markers = [AddedToken(token, special=True) for token in ("<think>", "</think>", "<|im_end|>")]
    tokenizer.add_tokens(markers, special_tokens=True)
    spoken = "<think>c</think>#f<|im_end|>"
    plain = stored(spoken, [], [], tokenizer)
    (seen,) = reward_inputs(plain, ResponseText(tokenizer), [SampleId(0)])
    assert seen.response == "<think>c</think>#f"
    (seen,) = reward_inputs(plain, ResponseText(tokenizer, skips=True), [SampleId(0)])
    assert seen.response == "c#f"
    turns = [Turn(0, 6, "stop"), Turn(7, 9, "stop")]
    talk = stored(f"{spoken}a#h", turns, [0.0, 1.0], tokenizer)
    (seen,) = reward_inputs(talk, ResponseText(tokenizer), [SampleId(0)])
    assert [m["content"] for m in seen.item["conversation"]] == ["<think>c</think>#f", "a", "#h"]
