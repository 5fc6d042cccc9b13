"""Guessing ahead changes when a token is made, never which: every source, against none."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from transformers import PreTrainedModel

from hybridrl.config import RouterReplay
from hybridrl.engines.rollout.draft_lengths import BestLength, FixedLength, PromptGroup
from hybridrl.engines.rollout.drafts import DraftSource, SeenTexts
from hybridrl.engines.rollout.entries import Entry
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams, Stats
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.speculation import Guess, Speculation
from hybridrl.engines.rollout.stage import DrawnTokens
from hybridrl.engines.rollout.stops import StopStrings

VOCAB = 52
Make = Callable[..., NativeEngine]
Finish = Callable[..., dict[object, Output]]
RequestsOf = Callable[..., list[Request]]
Same = Callable[[dict[object, Output], dict[object, Output]], None]


class Known:
    """Guesses from the outputs of another engine, changed by `change` (request, tokens)."""

    def __init__(
        self,
        outputs: dict[object, Output],
        change: Callable[[Request, list[int]], list[int]] = lambda request, tokens: tokens,
    ) -> None:
        self._outputs, self._change = outputs, change

    def begin(self, request: Request) -> None: ...

    def end(self, request: Request) -> None: ...

    def siblings(self, request: Request) -> dict[object, list[int]]:
        return {}

    def draft(self, request: Request, most: int) -> Sequence[int]:
        tokens = self._outputs[request.id].token_ids[len(request.response_ids) :]
        return self._change(request, tokens[:most])


def wrong(request: Request, tokens: list[int]) -> list[int]:
    return [(token + 1) % VOCAB for token in tokens]


def mixed(request: Request, tokens: list[int]) -> list[int]:
    """Right up to a place that differs by row and pass, then wrong, and of another length."""
    draw = random.Random(f"{request.stream} {len(request.response_ids)}")
    place = draw.randrange(6)
    return [*tokens[:place], *wrong(request, tokens[place:])][: draw.randrange(8)]


def too_long(request: Request, tokens: list[int]) -> list[int]:
    """Longer than any room: of the draft, of the response, of the cache."""
    return [*tokens, *(7 for _ in range(200))]


def at_random(request: Request, tokens: list[int]) -> list[int]:
    draw = random.Random(f"{request.stream} {len(request.response_ids)}")
    return [draw.randrange(VOCAB) for _ in range(draw.randrange(8))]


CHANGES = {
    "right": lambda request, tokens: tokens,
    "wrong": wrong,
    "mixed": mixed,
    "too_long": too_long,
    "random": at_random,
}


def sources(outputs: dict[object, Output]) -> Iterator[tuple[str, DraftSource]]:
    for name, change in CHANGES.items():
        yield name, Known(outputs, change)
    yield "seen", SeenTexts()


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"temperature": 1.0},
        {"top_p": 0.8},
        {"top_k": 5, "temperature": 0.7},
        {"min_p": 0.1, "stop_token_ids": (3, 11)},
    ],
    ids=str,
)
def test_tokens_are_those_without_drafts(
    sampling: dict[str, float],
    model: PreTrainedModel,
    make_engine: Make,
    finish: Finish,
    requests_of: RequestsOf,
    same: Same,
) -> None:
    requests = requests_of(16, group=4, prefix=True, **sampling)
    plain = make_engine(model)
    wanted = finish(plain, requests)
    for name, source in sources(wanted):
        engine = make_engine(model, speculation=Speculation(source, FixedLength(5)))
        same(finish(engine, requests), wanted)
        stats = engine.stats()
        assert stats.kv_blocks_free == stats.kv_blocks_total
        drafted, accepted = stats.drafted_tokens, stats.accepted_tokens
        assert drafted
        if name == "right":
            assert accepted == drafted
            assert stats.decode_steps < plain.stats().decode_steps / 4
        if name == "wrong":
            assert accepted == 0
            assert stats.decode_steps == plain.stats().decode_steps
        if name == "mixed":
            assert 0 < accepted < drafted


@pytest.fixture(scope="module")
def undrafted(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf
) -> Callable[..., tuple[dict[object, Output], Stats]]:
    """`undrafted(**options)`: outputs and counts of 24 requests without drafts, made once."""

    @functools.cache
    def run(**options: int) -> tuple[dict[object, Output], Stats]:
        engine = make_engine(model, **options)
        return finish(engine, requests_of(24, group=4, prefix=True)), engine.stats()

    return run


def drafting(source: DraftSource, length: int = 5) -> dict[str, Speculation]:
    return {"speculation": Speculation(source, FixedLength(length))}


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gemma3", "qwen3_moe", "mixtral"])
def test_every_family(
    family: str, make_model: Callable[..., PreTrainedModel], make_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """Sliding windows, the module in place of the fused step, experts."""
    model = make_model(family)
    requests = requests_of(9, group=3, prefix=True)
    wanted = finish(make_engine(model), requests)
    same(finish(make_engine(model, **drafting(Known(wanted, mixed))), requests), wanted)


def decode(ids: Sequence[int]) -> str:
    """A text of two letters a token."""
    return "".join("abc"[token % 3] + "de"[token % 2] for token in ids)


def test_texts_and_limits_end_a_response_within_a_draft(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf, same: Same
) -> None:
    requests = requests_of(24, group=4, prefix=True)
    longest = finish(make_engine(model), requests)
    stops = {"stops": StopStrings(decode, ["bda", "ecea"])}
    wanted = finish(make_engine(model, **stops), requests)
    assert {output.finish for output in wanted.values()} == {"stop", "length"}
    # The source knows how responses would go on, beyond the texts that end them.
    source = Known(longest, too_long)
    engine = make_engine(model, **stops, **drafting(source, 50))
    same(finish(engine, requests), wanted)
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


@pytest.mark.parametrize("with_kv", [False, True])
@pytest.mark.parametrize("change", ["right", "mixed", "seen"])
def test_parked_and_moved_in_the_middle(
    change: str, with_kv: bool, model: PreTrainedModel, make_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same,
) -> None:  # fmt: skip
    """From an engine that drafts to one that does not, to a third that does, which slept."""
    requests = requests_of(24, group=4, prefix=True)
    wanted = finish(make_engine(model), requests)

    def engine(drafts: bool) -> NativeEngine:
        source = SeenTexts() if change == "seen" else Known(wanted, CHANGES[change])
        return make_engine(model, **(drafting(source, 3) if drafts else {}))

    first, second, third = (engine(drafts) for drafts in (True, False, True))
    third.submit(requests[:4])
    outputs = finish(third)
    third.sleep()
    third.load_weights(model.state_dict().items())
    first.submit(requests[4:])
    for source, target, num_steps in ((first, second, 3), (second, third, 2)):
        for _ in range(num_steps):
            outputs |= {output.id: output for output in source.step()}
        parked = source.park(range(24), with_kv=with_kv)
        assert all((request.kv is not None) == with_kv for request in parked)
        assert source.stats().kv_blocks_free == source.stats().kv_blocks_total
        target.submit(parked)
    same(outputs | finish(third), wanted)


@pytest.mark.long
@pytest.mark.parametrize("change", CHANGES)
def test_no_sample_is_preempted_for_a_draft(
    change: str, model: PreTrainedModel, make_engine: Make, finish: Finish,
    requests_of: RequestsOf, same: Same,
    undrafted: Callable[..., tuple[dict[object, Output], Stats]],
) -> None:  # fmt: skip
    """A cache with room for little more than the longest sample."""
    requests = requests_of(24, group=4, prefix=True)
    wanted, _ = undrafted()
    longest = max(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)
    for spare in (8, 40):
        tight = {"block_size": 1, "kv_cache_tokens": longest + spare}
        _, plain = undrafted(**tight)
        engine = make_engine(model, **tight, **drafting(Known(wanted, CHANGES[change])))
        same(finish(engine, requests), wanted)
        assert plain.num_preempted > 0
        if change == "wrong":  # as many steps, of the same rows
            assert engine.stats().num_preempted == plain.num_preempted
            assert engine.stats().decode_steps == plain.decode_steps
        assert engine.stats().kv_blocks_free == engine.stats().kv_blocks_total


def test_rows_whose_logits_depend_on_tokens_are_not_drafted_for(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf
) -> None:
    """Their batches are those without drafts, bit for bit."""
    edits = {"repetition_penalty": 1.4, "min_new_tokens": 4, "bad_words": ((3,), (4, 5))}
    requests = requests_of(9, group=3, **edits)
    engine, plain = make_engine(model, **drafting(SeenTexts())), make_engine(model)
    assert finish(engine, requests) == finish(plain, requests)
    assert engine.stats().drafted_tokens == 0


@pytest.mark.parametrize("change", ["right", "mixed"])
def test_experts_of_accepted_tokens_are_recorded(
    change: str, make_model: Callable[..., PreTrainedModel], make_engine: Make, finish: Finish,
    requests_of: RequestsOf,
) -> None:  # fmt: skip
    model = make_model("qwen3_moe", num_hidden_layers=3)
    requests = requests_of(9, group=3, prefix=True)
    replay = {"router_replay": RouterReplay.rollout}
    wanted = finish(make_engine(model, **replay), requests)
    source = Known(wanted, CHANGES[change])
    for id_, output in finish(make_engine(model, **replay, **drafting(source)), requests).items():
        ours, theirs = output.routed_experts, wanted[id_].routed_experts
        assert ours is not None
        assert theirs is not None
        assert output.token_ids == wanted[id_].token_ids
        assert len(ours) == len(requests[id_].prompt_ids) + len(output.token_ids) - 1
        np.testing.assert_array_equal(ours.whole(), theirs.whole())


def calls(engine: NativeEngine, requests: list[Request], limit: int) -> list[set[object]]:
    """The requests that finish in each call of `limit` tokens, as an actor makes them."""
    engine.submit(requests)
    finished: list[set[object]] = []
    while (stats := engine.stats()).running or stats.waiting:
        engine.begin_call(limit)
        outputs: list[Output] = []
        for _ in range(limit):
            if not engine.call_is_done:
                outputs += engine.step()
        finished.append({output.id for output in outputs})
    return finished


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [{}, {"max_running": 5}, {"block_size": 1, "kv_cache_tokens": 90}, {"kv_cache_tokens": 200}],
    ids=str,
)
def test_a_call_counts_tokens(
    options: dict[str, object], model: PreTrainedModel, make_engine: Make, finish: Finish,
    requests_of: RequestsOf,
) -> None:  # fmt: skip
    """Equal requests finish in every call, though some wait, or are preempted."""
    requests = requests_of(24, group=4, prefix=True)
    outputs = finish(make_engine(model), requests)
    for limit in (4, 16):
        plain = make_engine(model, **options)
        wanted = calls(plain, requests, limit)
        for _, source in sources(outputs):
            engine = make_engine(model, **options, **drafting(source))
            assert calls(engine, requests, limit) == wanted
            stats = engine.stats()
            assert stats.num_preempted == plain.stats().num_preempted
            assert stats.shared_prompt_tokens == plain.stats().shared_prompt_tokens
            # Where samples wait or blocks are few all through, nothing may be drafted.
            assert stats.drafted_tokens or options


def test_the_example_of_the_docs() -> None:
    """docs/rollout.md, Guessing ahead: a guess that is not what is drawn ends what is accepted."""
    source = SeenTexts()
    sibling = Request(1, [1], SamplingParams(50), 1, response_ids=[2, 4, 6, 8, 9])
    request = Request(0, [1], SamplingParams(50), 0, response_ids=[2, 4])
    for known in (sibling, request):
        source.begin(known)
    assert source.draft(request, 3) == [6, 8, 9]
    speculation = Speculation(source, FixedLength(3))
    guess = Guess(Entry(request, 0), [6, 8, 9])
    assert speculation.accept(guess, DrawnTokens([6, 8, 10, 5], [0.0] * 4), 0, None) == (3, None)
    assert request.response_ids == [2, 4, 6, 8, 10]
    assert (speculation.num_drafted, speculation.num_accepted) == (3, 2)


def test_texts_are_continued_as_before() -> None:
    source = SeenTexts()
    own = Request(0, [9, 9], SamplingParams(50), 0, response_ids=[1, 2, 3, 4, 1, 2])
    source.begin(own)
    assert source.draft(own, 3) == [3, 4, 1]
    assert source.draft(own, 9) == [3, 4, 1, 2, 3, 4, 1, 2, 3]  # a copy's end is looked up
    sibling = Request(1, [9, 9], SamplingParams(50), 1, response_ids=[1, 2])
    source.begin(sibling)
    assert source.draft(sibling, 2) == [3, 4]
    source.end(own)  # what has finished still counts, also in a later step
    later = Request(2, [9, 9], SamplingParams(50), 2)
    source.begin(later)
    assert source.draft(later, 4) == [1, 2, 3, 4]
    other = Request(3, [9, 8], SamplingParams(50), 3, response_ids=[1, 2])
    source.begin(other)
    assert source.draft(other, 4) == []
    resumed = replace(own, response_ids=[*own.response_ids, 3, 7])
    source.begin(resumed)
    last = Request(4, [9, 9], SamplingParams(50), 4, response_ids=[5, 1, 2])
    source.begin(last)
    assert source.draft(last, 3) == [3, 7]  # of 4 and 7 behind 1 2 3, the last to appear


def test_a_response_that_begins_again_is_another_text() -> None:
    """A prompt that was put off, or is evaluated again, has the same id."""
    source = SeenTexts()
    first = Request(0, [9, 9], SamplingParams(50), 0, response_ids=[1, 2, 3, 4])
    source.begin(first)
    source.draft(first, 1)
    source.end(first)
    again = replace(first, response_ids=[])
    source.begin(again)
    assert source.draft(again, 3) == [1, 2, 3]
    again.response_ids += [1, 2]
    assert source.draft(again, 3) == [3, 4]


def test_siblings_go_along(
    model: PreTrainedModel, make_engine: Make, finish: Finish, requests_of: RequestsOf, same: Same
) -> None:
    """To an engine that has seen none of them: a wide instance, or that of another rank."""
    requests = requests_of(8, group=4, prefix=True)
    wanted = finish(make_engine(model), requests)
    sources = [SeenTexts(), SeenTexts()]
    first, second = (make_engine(model, **drafting(source, 3)) for source in sources)
    first.submit(requests)
    outputs = {output.id: output for _ in range(6) for output in first.step()}
    parked = first.park([request.id for request in requests])
    assert len(parked) > 2
    known = {request.id: list(request.response_ids) for request in parked}
    for request in parked:
        others = [o for o in parked if o.prefix == request.prefix and o is not request]
        assert others
        assert all(request.siblings[other.id] == known[other.id] for other in others)
    second.submit(parked[:1])
    second.step()
    (moved,) = (entry.request for lane in second._admission.lanes for entry in lane.entries)
    alone, context = SeenTexts(), known[parked[1].id]
    stranger = replace(moved, id="new", response_ids=context[:2], siblings={})
    for source in (sources[1], alone):
        source.begin(stranger)
    assert sources[1].draft(stranger, 2) == context[2:4]
    assert alone.draft(stranger, 2) == []
    for source in (sources[1], alone):
        source.end(stranger)
    second.submit(parked[1:])
    same(outputs | finish(second), wanted)


@pytest.mark.parametrize("drafts", [True, False])
def test_old_texts_are_forgotten(drafts: bool) -> None:
    """Nothing is guessed here, and so nothing indexed."""
    source = SeenTexts(most_tokens=100)
    for i in range(20):
        request = Request(i, [i, i + 1], SamplingParams(50), i, response_ids=[*range(30)])
        source.begin(request)
        assert not drafts or source.draft(request, 1) == []
        source.end(request)
        assert 30 <= source.num_tokens <= 100
    repeated = [Request(i, [1, 2], SamplingParams(50), i) for i in range(20)]
    for request in repeated:
        source.begin(request)
        request.response_ids += range(30)
        if drafts:
            source.draft(request, 1)
    for request in repeated:
        source.end(request)
    assert source.num_tokens <= 100


GROUP = PromptGroup("task", 0)


def test_acceptance_is_learned_by_task() -> None:
    """Prompts that are new take after others of their task; in one batch, and where none pays."""
    lengths = BestLength()
    for tokens in (2, 4, 8, 16, 32):
        for _ in range(3):
            lengths.saw_pass(2, tokens, 10 + 0.5 * tokens)
    for prompt in range(200):
        lengths.saw_draft(PromptGroup("repeats", prompt), 8, 8)
        lengths.saw_draft(PromptGroup("differs", prompt), 8, 0)
    repeats, differs = PromptGroup("repeats", 900), PromptGroup("differs", 901)
    chosen = lengths.choose([repeats, differs])
    assert chosen[0] >= 8
    assert chosen[1] == 0
    # A task is tried again, though another one always guesses.
    for _ in range(400):
        lengths.saw_pass(2, 2, 11)
        lengths.saw_pass(2, 16, 18)
    assert any(lengths.choose([repeats, differs])[1] for _ in range(4000))


def test_drafts_are_as_long_as_pays() -> None:
    """The docstring's example; and where rows cost what they yield, none."""

    def best(per_token: float, accepted: float, rows: int = 1) -> list[int]:
        lengths = BestLength()
        for tokens in (1, 2, 4, 8, 16, 32, 64):
            for _ in range(3):
                lengths.saw_pass(rows, max(rows, tokens), 10 + per_token * (max(rows, tokens) - 1))
        for i in range(3000):
            run = 0
            while run < 16 and random.Random(f"{i} {run}").random() < accepted:
                run += 1
            lengths.saw_draft(GROUP, 16, run)
        return lengths.choose([GROUP] * rows)

    (eight,) = best(0.5, 0.8)
    assert 6 <= eight <= 10
    assert best(0.5, 0.0) == [0]
    assert best(10.0, 0.8) == [0]
    (more,), (fewer,) = best(0.01, 0.8), best(3.0, 0.8)
    assert fewer < eight < more
    assert len(set(best(0.5, 0.8, rows=4))) == 1
    assert best(0.5, 0.8, rows=4)[0] < eight


def test_drafts_are_tried_again() -> None:
    lengths = BestLength()
    for _ in range(100):
        lengths.saw_pass(4, 4, 0.01)
        lengths.saw_draft(GROUP, 4, 0)
    chosen = [max(lengths.choose([GROUP] * 4)) for _ in range(2000)]
    assert chosen[0] == 0
    assert sum(map(bool, chosen)) > 0
