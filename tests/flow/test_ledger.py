"""The life of a sample: what the ledger's table allows, and what a step makes of each."""

import re
from itertools import product

import pytest

from hybridrl.flow import Sample, SampleId
from hybridrl.flow.ledger import Drop, DropReason, Ledger, SampleStatus

QUEUED, DECODING, WAITING, PARKED, FINISHED, USED, DROPPED = SampleStatus

TABLE = {
    (QUEUED, DECODING),
    (QUEUED, FINISHED),
    (QUEUED, DROPPED),
    (DECODING, WAITING),
    (DECODING, PARKED),
    (DECODING, FINISHED),
    (DECODING, QUEUED),
    (DECODING, DROPPED),
    (WAITING, DECODING),
    (WAITING, PARKED),
    (WAITING, QUEUED),
    (WAITING, DROPPED),
    (PARKED, DECODING),
    (PARKED, WAITING),
    (PARKED, QUEUED),
    (PARKED, DROPPED),
    (FINISHED, USED),
    (FINISHED, DROPPED),
    (FINISHED, QUEUED),
    (USED, QUEUED),
}
PATHS = {
    QUEUED: [],
    DECODING: [DECODING],
    WAITING: [DECODING, WAITING],
    PARKED: [DECODING, PARKED],
    FINISHED: [DECODING, FINISHED],
    USED: [DECODING, FINISHED, USED],
    DROPPED: [DROPPED],
}
FILTERED = Drop(DropReason.FILTER, "filter: f")


def in_status(status: SampleStatus) -> tuple[Ledger, Sample]:
    ledger, sample = Ledger(), Sample(id=SampleId(0))
    ledger.dispatch([sample])
    for step in PATHS[status]:
        ledger.move(sample.id, step)
    return ledger, sample


@pytest.mark.parametrize(("before", "after"), list(product(SampleStatus, repeat=2)))
def test_a_status_changes_by_the_table_alone(before, after):
    ledger, sample = in_status(before)
    if (before, after) in TABLE:
        ledger.move(sample.id, after)
        assert ledger.status(sample.id) is after
    else:
        with pytest.raises(AssertionError, match=f"0 cannot be {after.value}: {before.value}"):
            ledger.move(sample.id, after)
        assert ledger.status(sample.id) is before
    unfinished = ledger.status(sample.id) in (QUEUED, DECODING, WAITING, PARKED)
    assert ledger.num_unfinished == unfinished


def test_the_docstring_has_the_table():
    rows = re.findall(r"^ *\| (\w+) +\| (\w+) +\|", str(Ledger.__doc__), re.MULTILINE)
    assert rows[0] == ("from", "to")
    assert len(rows[1:]) == len(TABLE)
    assert {(SampleStatus(a), SampleStatus(b)) for a, b in rows[1:]} == TABLE


@pytest.mark.parametrize("status", SampleStatus)
def test_a_sample_begins_queued_parked_or_finished(status):
    ledger, sample = Ledger(), Sample(id=SampleId(0))
    if status in (QUEUED, PARKED, FINISHED):
        ledger.dispatch([sample], status)
        assert ledger.status(sample.id) is status
    else:
        with pytest.raises(AssertionError, match=f"no sample begins as {status.value}"):
            ledger.dispatch([sample], status)


def test_a_second_dispatch_and_strangers_are_bugs():
    ledger, sample = in_status(QUEUED)
    with pytest.raises(AssertionError, match="dispatched twice"):
        ledger.dispatch([sample])
    with pytest.raises(AssertionError, match="never dispatched"):
        ledger.use([Sample(id=SampleId(1))])
    with pytest.raises(AssertionError, match="never dispatched"):
        ledger.leave([Sample(id=SampleId(1))], DropReason.FILTER, "filter: f")


def test_settle_drops_what_nothing_reads_for_the_first_reason():
    ledger = Ledger()
    a, b, c, d = (Sample(id=SampleId(i)) for i in range(4))
    ledger.dispatch([a, b, c, d], FINISHED)
    ledger.leave([a, b], DropReason.FILTER, "filter: f")
    ledger.leave([b], DropReason.TAKE, "take: t")
    ledger.use([a])
    ledger.use([a])  # by the critic, too
    used, dropped = ledger.settle(pending={d.id})
    assert used == [a]
    unused = Drop(DropReason.UNUSED, "unused: no update reads it")
    assert dropped == {b.id: FILTERED, c.id: unused}
    assert [ledger.status(s.id) for s in (a, b, c, d)] == [USED, DROPPED, DROPPED, FINISHED]
    assert ledger.forget({d.id}) == [a.id, b.id, c.id]
    assert ledger.samples == (d,)


def test_a_reason_stands_until_a_later_step_settles_the_sample():
    ledger, sample = Ledger(), Sample(id=SampleId(0))
    ledger.dispatch([sample], FINISHED)
    ledger.leave([sample], DropReason.FILTER, "filter: f")
    assert ledger.settle(pending={sample.id}) == ([], {})
    assert ledger.forget({sample.id}) == []
    assert ledger.settle() == ([], {sample.id: FILTERED})


def test_a_used_sample_that_is_made_again_stays_used():
    ledger, sample = Ledger(), Sample(id=SampleId(0), rank=3, tensors={"tokens"})
    ledger.dispatch([sample], FINISHED)
    ledger.use([sample])
    ledger.restart(sample.id)
    assert (ledger.status(sample.id), sample.tensors) == (QUEUED, set())
    assert not ledger.is_finished(sample.id)
    ledger.move(sample.id, DECODING)
    ledger.move(sample.id, FINISHED)
    assert ledger.settle() == ([sample], {})
    assert ledger.status(sample.id) is USED


@pytest.mark.parametrize("status", SampleStatus)
def test_what_a_failed_step_has_left_is_dropped(status):
    ledger, sample = in_status(status)
    record = ledger._records[sample.id]
    assert ledger.forget() == [sample.id]
    assert record.status is (USED if status is USED else DROPPED)
    assert (record.left is None) is (status in (USED, DROPPED))
    assert (ledger.samples, ledger.num_unfinished) == ((), 0)
