"""Chat templates, messages and the token that ends a response."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AddedToken

from hybridrl.config import ConfigError, SourceConfig, SourceKind
from hybridrl.data import Data, end_token_id

Load = Callable[..., Data]


def test_the_chat_template_wraps_the_filled_prompt(
    load: Load, jsonl: Any, chat_tokenizer: Any
) -> None:
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(30)]
    source = SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows))
    data = load(
        source,
        tokenizer=chat_tokenizer,
        chat=True,
        system_prompt="Be brief.",
        prompt_template="What is {question}",
    )
    item = data.train[0]
    assert item.prompt == (
        f"<system>Be brief.<eos>\n<user>What is {item.answer}?<eos>\n<assistant>"
    )
    expected = chat_tokenizer.apply_chat_template(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {item.answer}?"},
        ],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert list(item.prompt_ids) == list(expected)
    assert chat_tokenizer.decode(item.target_ids) == f"{item.answer}<eos>"


def test_lists_of_messages_keep_their_turns(load: Load, jsonl: Any, chat_tokenizer: Any) -> None:
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Own."},
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "hello"},
                {"role": "user", "content": f"{n}?"},
            ],
            "answer": str(n),
        }
        for n in range(30)
    ]
    source = SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows))
    data = load(
        source,
        tokenizer=chat_tokenizer,
        chat=True,
        system_prompt="not used: the messages have one",
        prompt_template="{question} Answer:",
    )
    item = data.train[0]
    assert item.prompt == (
        "<system>Own.<eos>\n<user>hi<eos>\n<assistant>hello<eos>\n"
        f"<user>{item.answer}? Answer:<eos>\n<assistant>"
    )
    assert item.item["prompt"][-1]["content"] == f"{item.answer}?"  # the row stays as it was
    with pytest.raises(ConfigError, match=r"data\.chat=False: .*s has lists of messages"):
        load(source)


def test_chat_needs_a_template(load: Load, jsonl: Any) -> None:
    rows = [{"prompt": f"{n}?", "answer": str(n)} for n in range(30)]
    with pytest.raises(ConfigError, match=r"data\.chat=True: .*no chat template"):
        load(SourceConfig(kind=SourceKind.jsonl, name=jsonl(rows)), chat=True)


def test_the_end_of_turn_is_read_off_the_template(tokenizer: Any, chat_tokenizer: Any) -> None:
    assert end_token_id(tokenizer, chat=False) == tokenizer.eos_token_id
    assert end_token_id(chat_tokenizer, chat=True) == tokenizer.eos_token_id


@pytest.mark.parametrize("has_a_role", [True, False])
def test_an_end_of_turn_that_is_not_the_eos_token(has_a_role: bool) -> None:
    """As in SmolLM2-Instruct, whose eos opens a turn; Phi's end is special without a role."""
    from hybridrl.models.tiny import make_char_tokenizer

    tokenizer = make_char_tokenizer("QAx\n", 64)
    if has_a_role:
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    else:
        tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    assert ("<|end|>" in tokenizer.all_special_tokens) == has_a_role
    tokenizer.chat_template = "{% for m in messages %}<eos>x{{ m['content'] }}<|end|>\n{% endfor %}"
    assert end_token_id(tokenizer, chat=True) == tokenizer.convert_tokens_to_ids("<|end|>")
    assert end_token_id(tokenizer, chat=False) == tokenizer.eos_token_id
