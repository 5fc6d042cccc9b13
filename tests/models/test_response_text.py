"""What the text of a response keeps of its special tokens."""

from collections.abc import Sequence

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from hybridrl.models.response_text import ResponseText
from hybridrl.models.tiny import make_char_tokenizer

IM = ["<|im_start|>", "<|im_end|>"]


def tokenizer(special: Sequence[str], plain: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    mine = make_char_tokenizer("abcdefghij{}", 64)
    mine.add_tokens([AddedToken(token, special=True) for token in special], special_tokens=True)
    mine.add_tokens([AddedToken(token, special=False) for token in plain])
    return mine


def text(mine: PreTrainedTokenizerFast, written: str, skips: bool | None = None) -> str:
    ids = mine(written, add_special_tokens=False)["input_ids"]
    return ResponseText(mine, skips)([*ids, mine.eos_token_id])


@pytest.mark.parametrize(
    ("special", "written", "kept"),
    [
        (["<think>", "</think>", *IM], "<think>ab</think>c<|im_end|>", "<think>ab</think>c"),
        (["[TOOL_CALLS]", "[ARGS]"], "[TOOL_CALLS]f[ARGS]{a}", "[TOOL_CALLS]f[ARGS]{a}"),
        (
            ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"],
            "<|channel|>a<|message|>b<|end|><|start|>c<|channel|>d<|message|>e<|return|>",
            "<|channel|>a<|message|>b<|end|><|start|>c<|channel|>d<|message|>e",
        ),
        (["<|tool_call_begin|>", "<|tool_call_end|>"], "<|tool_call_begin|>a<|tool_call_end|>",
         "<|tool_call_begin|>a<|tool_call_end|>"),
        (["<|python_tag|>", "<|eot_id|>"], "<|python_tag|>a<|eot_id|>", "<|python_tag|>a"),
        (["<|start|>", "<|message|>", *IM], "<|im_start|>a<|message|>b<|im_end|>", "ab"),
    ],
)  # fmt: skip
def test_markers_of_thoughts_and_calls_stay(special: list[str], written: str, kept: str) -> None:
    """Ends and other special tokens do not; `true` takes all of them out, as the tokenizer does."""
    mine = tokenizer(special)
    assert text(mine, written) == kept
    ids = mine(written, add_special_tokens=False)["input_ids"]
    plain = mine.decode(ids, skip_special_tokens=True)
    assert text(mine, written, True) == plain
    assert (plain == kept) == (not ResponseText(mine).kept)


def test_markers_that_are_no_special_tokens_stay_as_they_are() -> None:
    mine = tokenizer(IM, ["<think>", "</think>"])
    assert ResponseText(mine).kept == {}
    assert text(mine, "<think>ab</think>c<|im_end|>") == "<think>ab</think>c"
    assert text(mine, "<think>ab</think>c<|im_end|>", True) == "<think>ab</think>c"


def test_all_but_the_end() -> None:
    mine = tokenizer(["<think>", "</think>", "<|note|>", *IM])
    assert text(mine, "<think>a<|note|>b</think>c<|im_end|>", False) == (
        "<think>a<|note|>b</think>c"
    )
    assert text(mine, "ab<think>c</think>", False) == "ab<think>c</think>"
