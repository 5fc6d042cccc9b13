"""The suffix automaton of drafts against a search through all texts."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.engines.rollout.suffix_automaton import ROOT, SuffixAutomaton


def followers(texts: list[list[int]], context: list[int]) -> Counter[int]:
    """How often each token comes behind `context`."""
    n = len(context)
    return Counter(
        text[i + n] for text in texts for i in range(len(text) - n) if text[i : i + n] == context
    )


def search(
    texts: list[list[int]], text: list[int], most: int, shortest: int, share: float
) -> list[set[int]]:
    """The most frequent tokens behind the longest suffix of `text` that went on, place by place.

    Where several are equally frequent the search ends, since any of them may be taken.
    """
    context, likely, places = list(text), 1.0, list[set[int]]()
    while len(places) < most:
        while context and not followers(texts, context):
            context.pop(0)
        counts = followers(texts, context)
        if len(context) < shortest or not counts:
            break
        best = max(counts.values())
        likely *= best / sum(counts.values())
        if likely < share:
            break
        places.append({token for token, count in counts.items() if count == best})
        if len(places[-1]) > 1:
            break
        context.append(*places[-1])
    return places


@pytest.mark.long
@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.3, 0.6]),
)
def test_continuations_are_those_of_a_search(
    wholes: list[list[int]], draw: random.Random, shortest: int, share: float
) -> None:
    """While the texts grow in any order, some tokens at a time."""
    automaton = SuffixAutomaton()
    texts = [list[int]() for _ in wholes]
    states = [ROOT] * len(wholes)
    while growing := [i for i, whole in enumerate(wholes) if len(texts[i]) < len(whole)]:
        i = draw.choice(growing)
        new = wholes[i][len(texts[i]) :][: draw.randint(1, 4)]
        texts[i] += new
        states[i] = automaton.extend(states[i], new)
        for text, state in zip(texts, states, strict=True):
            tokens = automaton.continuation(state, 5, shortest, share)
            places = search(texts, text, 5, shortest, share)
            ties = bool(places) and len(places[-1]) > 1
            assert len(tokens) == len(places) or (ties and len(tokens) > len(places))
            assert all(token in place for token, place in zip(tokens, places, strict=False))
    assert len(automaton) <= 2 * sum(map(len, texts)) + 1


def test_repetition_takes_few_states_and_steps() -> None:
    """A text of one token has a chain of contexts as long as itself; few of them are counted."""
    automaton = SuffixAutomaton()
    state = automaton.extend(ROOT, [7] * 3000)
    assert len(automaton) == 3001
    assert automaton.continuation(state, 6, 2, 0.3) == [7] * 6


def test_the_example_of_the_docstring() -> None:
    automaton = SuffixAutomaton()
    for text in ("abcx", "abcy", "abcy"):
        automaton.extend(ROOT, map(ord, text))
    state = automaton.extend(ROOT, map(ord, "zabc"))
    assert automaton.continuation(state, 3, 2, 0.3) == [ord("y")]
