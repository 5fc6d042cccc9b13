"""What judges see of samples: of conversations the last turn, the messages, what was earned."""

import torch

from hybridrl.config import RewardConfig, RewardKind
from hybridrl.data import Item
from hybridrl.engines.rollout.interface import Turn
from hybridrl.flow.sample import SampleId
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.rewards import RewardPool
from hybridrl.workers.roles import reward_inputs
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.turns import conversation_tensors

TOKENIZER = make_char_tokenizer("abcdefgh#?", 99)


def stored(response: str, turns: list[Turn], rewards: list[float]) -> SampleStore:
    ids = [*TOKENIZER("ab?")["input_ids"], *TOKENIZER(response)["input_ids"]]
    item = Item("ab?", (), "#f", (), "s", {"question": "ab"})
    tensors = {"tokens": torch.tensor(ids)}
    if turns:
        tensors |= conversation_tensors(turns, ids[:3], ids[3:], rewards)
    store = SampleStore()
    store.add(SampleId(0), StoredSample(len(response), item, tensors))
    return store


def test_a_conversation_is_told_apart() -> None:
    turns = [Turn(0, 2, "stop"), Turn(5, 6, "length"), Turn(7, 9, "stop")]
    store = stored("cdefgha#f", turns, [0.25, 0.0, 0.5])
    (seen,) = reward_inputs(store, TOKENIZER, [SampleId(0)])
    assert (seen.prompt, seen.response, seen.answer, seen.earned) == ("ab?", "#f", "#f", 0.75)
    assert seen.item["question"] == "ab"
    told = [(m["role"], m["content"]) for m in seen.item["conversation"]]
    assert told == [
        ("assistant", "cd"), ("environment", "efg"), ("assistant", "h"), ("environment", "a"),
        ("assistant", "#f"),
    ]  # fmt: skip
    for extract in (None, "nowhere"):  # what was earned does not follow from the text
        with RewardPool(RewardConfig(kind=RewardKind.environment, extract=extract)) as pool:
            assert [result.reward for result in pool.score([seen])] == [0.75]
    with RewardPool(RewardConfig(kind=RewardKind.exact)) as pool:
        assert [result.reward for result in pool.score([seen])] == [1.0]


def test_a_response_of_one_turn_is_as_ever() -> None:
    (seen,) = reward_inputs(stored("cd#f", [], []), TOKENIZER, [SampleId(0)])
    assert (seen.response, seen.earned, seen.item) == ("cd#f", None, {"question": "ab"})
