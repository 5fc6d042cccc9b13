"""Samples that wait, against a list of them that is looked through."""

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.flow.sample import Sample, SampleId
from hybridrl.flow.schedules.waiting_samples import WaitingSamples

SAMPLES = [Sample(id=SampleId(n), prompt_tokens=n) for n in range(4)]


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
    waiting, kept_on = WaitingSamples(), dict[SampleId, int | None]()
    for step, sample, instance in steps:
        if step == "add" and sample.id not in kept_on:
            waiting.add(sample, instance)
            kept_on[sample.id] = instance
        elif step == "remove":
            gone = waiting.remove(sample.id)
            assert (gone is None) == (sample.id not in kept_on)
            kept_on.pop(sample.id, None)
        elif step == "keep":
            waiting.keep(sample.id, instance)
            kept_on |= {sample.id: instance} if sample.id in kept_on else {}
        assert bool(waiting) == bool(kept_on)
        assert waiting.tokens() == sum(id.prompt for id in kept_on)
        for one in (0, 1):
            able = [id for id, place in kept_on.items() if place in (None, one)]
            assert sorted(s.id for s in waiting.able(one)) == sorted(able)
