"""Samples that wait, against a list of them that is looked through."""

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.flow.sample import Sample, SampleId
from hybridrl.schedule.waiting_samples import WaitingSamples

SAMPLES = [Sample(id=SampleId(n), prompt_tokens=1 + n // 2, rank=n % 3) for n in range(6)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("add", "remove", "keep")),
            st.sampled_from(SAMPLES),
            st.sampled_from((None, 0, 1)),
        )
    )
)
def test_an_instance_gets_what_is_free_and_what_is_kept_on_it(
    steps: list[tuple[str, Sample, int | None]],
) -> None:
    """Its own first, then the others; each the longest first, of equal ones the first."""
    waiting, kept_on = WaitingSamples(lambda sample: sample.rank), dict[SampleId, int | None]()
    for step, sample, instance in steps:
        if step == "add":
            waiting.add(sample, instance)
            kept_on[sample.id] = instance
        elif step == "remove":
            gone = waiting.remove(sample.id)
            assert gone == (sample if sample.id in kept_on else None)
            kept_on.pop(sample.id, None)
        elif step == "keep":
            waiting.keep(sample.id, instance)
            kept_on |= {sample.id: instance} if sample.id in kept_on else {}
        assert bool(waiting) == bool(kept_on)
        assert waiting.tokens() == sum(s.tokens for s in SAMPLES if s.id in kept_on)
        for one in (0, 1):
            able = [s for s in SAMPLES if kept_on.get(s.id, -1) in (None, one)]
            able.sort(key=lambda s: (kept_on[s.id] is None and s.rank != one, -s.tokens, s.id))
            assert [*waiting.able(one)] == able
            assert waiting.able_tokens(one) == sum(s.tokens for s in able)
            if able:
                assert waiting.least_tokens(one) == min(s.tokens for s in able)
