"""Stop texts: the tail that is looked at against the whole response, and the engine with them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram, WordPiece
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.requests import append_token
from hybridrl.engines.rollout.stops import StopStrings, _ends_within

CORPUS = [
    "the END of the ENDs",
    "naïve café €5 日本語の終わり 😀😃",
    "a\n\nb\nEND\n",
    "</answer> <ans",
]
TEXTS = ["END", "\n\n", "</answer>", "€", "の終", "😀", " of the", "e E", "ï"]
VOCAB = 52
Make = Callable[..., NativeEngine]
Finish = Callable[..., dict[object, Output]]
RequestsOf = Callable[..., list[Request]]


def byte_level() -> Tokenizer:
    """As GPT-2 and Qwen have it: a token is some bytes, perhaps of a part of a character."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Mistral have it: pieces with a mark for the space, and single bytes."""
    pieces = [
        "▁", "▁▁", "▁the", "▁E", "ND", "END", "E", "N", "D", "</", "ans", "wer", ">", "e", "▁of",
        "a", "\n", "ï", "の", "終", "日",
    ]  # fmt: skip
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def metaspace() -> Tokenizer:
    """As T5 and XLM-R have it: the first token loses its spaces, others keep them."""
    pieces = ["<unk>", "▁", "▁▁", "▁the", "▁E", "ND", "END", "E", "N", "D", "e", "▁e", "の", "\n"]
    tokenizer = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def word_piece() -> Tokenizer:
    """As BERT has it: spaces between tokens, but before a mark, which the first token keeps."""
    pieces = ["[UNK]", "the", "end", "##e", "##nd", "##E", "n", "##n", ".", "'", "の"]
    tokenizer = Tokenizer(WordPiece({piece: i for i, piece in enumerate(pieces)}))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_ends() -> Tokenizer:
    """As GPT has it: a mark at the end of a word is a space once another token follows."""
    pieces = ["th", "e", "e</w>", "E", "END</w>", "N", "D</w>", "n</w>", ".</w>", "</w>"]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, []))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def characters() -> Tokenizer:
    """A token is a character, but two are special texts."""
    tokenizer = Tokenizer(BPE({char: index for index, char in enumerate("END e\n</>の")}, []))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "N\n"])
    return tokenizer


def words() -> Tokenizer:
    """Without a decoder: spaces between all tokens."""
    return Tokenizer(BPE({word: index for index, word in enumerate(["a", "E", "ND", "e"])}, []))


def stripped() -> Tokenizer:
    """Lines at the beginning of a text are dropped, however many tokens they have."""
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(["\n", "\n\n", "E", "ND"])}, []))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip("\n", 9, 0)])
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
OTHERS = [metaspace(), word_piece(), word_ends(), characters(), words(), stripped()]


def first(ended: Callable[[Sequence[int]], bool], ids: Sequence[int]) -> int | None:
    """Tokens up to the first yes, with the question asked after every token."""
    return next((n for n in range(1, len(ids) + 1) if ended(ids[:n])), None)


def whole(tokenizer: Tokenizer, texts: Sequence[str], ids: Sequence[int]) -> int | None:
    """What is wanted: all of the response is decoded each time."""
    return first(lambda prefix: any(text in tokenizer.decode(prefix) for text in texts), ids)


@given(data=st.data())
def test_byte_level_tail_is_enough(data: st.DataObject) -> None:
    """Any tokens before, broken characters too; then the text, in odd pieces, and more."""
    texts = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2, unique=True))
    tokens = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30)
    pieces = [BYTE_LEVEL.token_to_id(c) for c in pre_tokenizers.ByteLevel().alphabet()]
    assert None not in pieces
    ids = data.draw(tokens)
    for text in data.draw(st.lists(st.sampled_from([*texts, *CORPUS]), min_size=1, max_size=3)):
        ids += data.draw(st.sampled_from([BYTE_LEVEL.encode(text).ids, single_bytes(text)]))
    ids += data.draw(tokens)
    stops = StopStrings(BYTE_LEVEL.decode, texts)
    wanted = whole(BYTE_LEVEL, texts, ids)
    assert first(stops.ended, ids) == wanted
    assert wanted is not None or not any(text in BYTE_LEVEL.decode(ids) for text in texts)


def single_bytes(text: str) -> list[int]:
    """A text as byte-level tokens of one byte each."""
    (split,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        text
    )
    return [BYTE_LEVEL.token_to_id(char) for char in split[0]]


@given(data=st.data())
def test_byte_fallback_tail_is_enough(data: st.DataObject) -> None:
    """Characters as pieces or as bytes, in whatever mixture; the tail may cut one in two."""
    texts = data.draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=2, unique=True))
    vocab = BYTE_FALLBACK.get_vocab()
    pieces = [index for index in vocab.values() if index >= 256]
    character = st.sampled_from([*"".join(texts), *"日本語😀é€ E\n"])
    one = st.one_of(
        st.sampled_from(pieces).map(lambda index: [index]),
        character.map(lambda char: list(char.encode())),  # token b is byte b
        st.sampled_from(texts).map(lambda text: list(text.encode())),
    )
    ids = [token for tokens in data.draw(st.lists(one, max_size=25)) for token in tokens]
    assert first(StopStrings(BYTE_FALLBACK.decode, texts).ended, ids) == whole(
        BYTE_FALLBACK, texts, ids
    )


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK, *OTHERS])
@given(data=st.data())
def test_what_cannot_close_a_text_need_not_be_decoded(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """The answers are those of a check after every token, for texts from anywhere in a response."""
    some = [*range(256, tokenizer.get_vocab_size())] if tokenizer is BYTE_FALLBACK else []
    token = st.integers(0, tokenizer.get_vocab_size()).map(lambda index: [index])
    pieces = [token, st.sampled_from(["語€", "END"]).map(lambda text: list(text.encode()))]
    one = st.one_of(st.sampled_from([[index] for index in some]), *pieces) if some else token
    ids = [id for tokens in data.draw(st.lists(one, min_size=1, max_size=20)) for id in tokens]
    text = tokenizer.decode(ids, skip_special_tokens=False) or "a"
    start = data.draw(st.integers(0, len(text) - 1))
    texts = [text[start : start + data.draw(st.integers(1, 6))]]
    assume("#" not in texts[0])  # which the first token of a tail keeps, wherever the tail begins
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    stops = StopStrings(decode, texts)
    ended = partial(stops.ended, min_tokens=data.draw(st.sampled_from([0, 0, 1, 3])))
    wanted = first(ended, ids)
    assert first(lambda prefix: stops.may_close(prefix[-1:]) and ended(prefix), ids) == wanted


def test_few_tokens_of_a_response_are_decoded() -> None:
    """Each kind of token twice, to know it; then tails, behind tokens that can close a text."""
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return BYTE_LEVEL.decode(list(ids))

    request = Request(0, [0], SamplingParams(5000), (0, 0))
    stops = StopStrings(decode, ["END", "€"])
    for token in single_bytes("the cats and a D, " * 100):
        assert append_token(request, token, 0.0, None, stops) is None
    kinds, closing = len(set("the cats and a D, ")), 100
    assert lengths.count(1) == lengths.count(2) == kinds
    assert len(lengths) == 2 * kinds + closing
    ends = [append_token(request, token, 0.0, None, stops) for token in single_bytes("END")]
    assert ends == [None, None, "stop"]


def test_only_a_tail_is_decoded() -> None:
    """However long the response is; once where no character is cut, four times at most."""
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return BYTE_LEVEL.decode(list(ids))

    stops = StopStrings(decode, ["END", "€"])
    assert not stops.ended(single_bytes("abc" * 5000))
    assert lengths == [7]
    assert not stops.ended(single_bytes("語" * 5000))
    assert lengths[1:] == [7, 6]
    assert not stops.ended(single_bytes("語" * 5000)[:-1])
    assert lengths[3:] == [7, 6, 5, 4]
    assert stops.ended(single_bytes("語" * 5000 + "€"))


@pytest.mark.parametrize("texts", [[], [""], ["a", ""]])
def test_an_empty_text_is_refused(texts: list[str]) -> None:
    with pytest.raises(ValueError, match="wanted one or more, none of them empty"):
        StopStrings(str, texts)


# The engine


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """52 tokens of one to three of the letters a, b and c, so that a text has many ways in.

    Transformers wants the letters a to f.
    """
    letters = "abc"
    names = [*"abcdef", *(x + y for x in letters for y in letters)]
    names += [x + y + z for x in letters for y in letters for z in letters]
    names += [f"{i}" for i in range(VOCAB - len(names))]
    core = Tokenizer(BPE({name: index for index, name in enumerate(names)}, []))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.mark.long
@pytest.mark.parametrize("texts", [["abca"], ["ccb", "bbbb", "3a"]])
def test_greedy_equals_generate_with_stop_strings(
    texts: list[str], tokenizer: PreTrainedTokenizerFast,
    make_model: Callable[[str], PreTrainedModel], make_engine: Make, finish: Finish,
    requests_of: RequestsOf,
) -> None:  # fmt: skip
    """It holds for parked ones, and for those resumed on a deterministic engine.

    Transformers lets the prompt's end count.
    """
    model = make_model("qwen3")
    model.generation_config.eos_token_id = None
    last = VOCAB - 1  # the token "9", with which no text begins
    requests = [
        replace(r, prompt_ids=[*r.prompt_ids, last]) for r in requests_of(24, temperature=0.0)
    ]
    stops = StopStrings(tokenizer.decode, texts)
    engine, other = (make_engine(model, stops=stops, deterministic=d) for d in (False, True))
    engine.submit(requests)
    outputs = {output.id: output for _ in range(3) for output in engine.step()}
    other.submit(engine.park(range(12), with_kv=True))
    other.submit(engine.park(range(12, 18)))
    outputs |= finish(engine) | finish(other)
    for request in requests:
        prompt = torch.tensor([[*request.prompt_ids]])
        wanted = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.sampling.max_new_tokens,
            do_sample=False,
            stop_strings=texts,
            tokenizer=tokenizer,
        )
        output = outputs[request.id]
        assert output.token_ids == wanted[0, len(request.prompt_ids) :].tolist()
        text = tokenizer.decode(output.token_ids)
        assert (output.finish == "stop") == any(stop in text for stop in texts)
    assert {output.finish for output in outputs.values()} == {"stop", "length"}


def test_a_text_that_is_complete_before_the_shortest_response_does_not_end_it() -> None:
    """As in vLLM: what the first `min_tokens` complete does not count, whatever the tail shows."""

    def decode(ids: Sequence[int]) -> str:
        return "".join("abEND"[id] for id in ids)

    stops = StopStrings(decode, ["END"])
    ids = [0, 2, 3, 4, 1, 2, 3, 4]
    for min_tokens, ends in ((0, [4, 5, 6, 7, 8]), (3, [4, 5, 6, 7, 8]), (4, [8]), (7, [8])):
        assert [n for n in range(1, 9) if stops.ended(ids[:n], min_tokens)] == ends, min_tokens
    assert not stops.ended(ids, 8)


def test_only_ends_of_a_text_that_fit_into_a_token_are_tried() -> None:
    """So that a text of many characters costs a token no more than its own."""
    tried = list[str]()

    class Piece(str):
        def startswith(self, end: Any, *_: Any) -> bool:
            tried.append(end)
            return super().startswith(end)

    text = "x" * 1000
    assert _ends_within(text, Piece("xxy"))
    assert not _ends_within(text, Piece("yx"))
    assert tried == ["xxx", "xx", "xx", "x"]
