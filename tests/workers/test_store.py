"""A rank's samples, and the parcels that take them to another rank."""

import pickle
import warnings

import numpy as np
import pytest
import torch

from hybridrl.flow.sample import SampleId
from hybridrl.workers.store import ROUTED_EXPERTS, Parcel, SampleStore, StoredSample

FIELDS = ("tokens", "log_probs")


def sample(prompt: int, response: int) -> StoredSample:
    return StoredSample(
        response,
        object(),
        {"tokens": torch.randint(0, 99, (prompt + response,)), "log_probs": torch.randn(response)},
    )


def filled(lengths: list[tuple[int, int]]) -> tuple[SampleStore, dict[SampleId, StoredSample]]:
    store, samples = SampleStore(), {}
    for i, (prompt, response) in enumerate(lengths):
        id = SampleId(i // 2, "main", i % 2)
        samples[id] = sample(prompt, response)
        store.add(id, samples[id])
    return store, samples


def through_a_store(parcel: Parcel) -> Parcel:
    """As shared memory gives it: arrays that are read-only views of somebody else's bytes."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(parcel, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(head, buffers=[memoryview(bytes(buffer.raw())) for buffer in buffers])


def popped(store: SampleStore, ids: list[SampleId], fields: tuple[str, ...]) -> Parcel:
    """A parcel of samples that leave their store."""
    parcel = store.pack(ids, fields)
    store.drop(ids)
    return parcel


def test_images_go_with_the_tokens_once() -> None:
    source, samples = filled([(3, 5), (3, 1)])
    first, second = samples
    samples[first].images = (b"picture",)
    destination = SampleStore()
    for fields in (("log_probs",), ("tokens",), ("log_probs",)):
        parcel = through_a_store(source.pack([first, second], fields))
        assert parcel.images == (((b"picture",), ()) if fields == ("tokens",) else ())
        destination.accept(parcel)
    assert (destination[first].images, destination[second].images) == ((b"picture",), ())


def test_ragged_samples_go_round_and_stay_what_they_were() -> None:
    source, samples = filled([(3, 5), (3, 1), (1, 700), (9, 2), (2, 33)])
    destination = SampleStore()
    ids = list(samples)
    moved = [ids[2], ids[0], ids[4]]  # in an order of their own
    destination.accept(through_a_store(popped(source, moved, FIELDS)))
    assert len(source) == 2
    assert len(destination) == 3
    for id in moved:
        arrived, sent = destination[id], samples[id]
        assert arrived.item is None
        assert arrived.response_tokens == sent.response_tokens
        for name in FIELDS:
            assert arrived.tensors[name].dtype == sent.tensors[name].dtype
            assert torch.equal(arrived.tensors[name], sent.tensors[name])
        assert torch.equal(arrived.response_ids, sent.response_ids)
        with pytest.raises(KeyError):
            source[id]


def test_what_arrived_can_be_sent_on() -> None:
    source, samples = filled([(2, 3), (4, 1)])
    between, last = SampleStore(), SampleStore()
    between.accept(through_a_store(popped(source, list(samples), FIELDS)))
    last.accept(through_a_store(popped(between, list(samples)[::-1], ("tokens",))))
    for id, sent in samples.items():
        assert torch.equal(last[id].tensors["tokens"], sent.tensors["tokens"])
        assert list(last[id].tensors) == ["tokens"]


def test_an_empty_response_and_no_samples_at_all() -> None:
    source, samples = filled([(4, 0), (2, 3)])
    destination = SampleStore()
    destination.accept(through_a_store(popped(source, list(samples), FIELDS)))
    (first, _) = samples
    assert destination[first].response_ids.numel() == 0
    assert destination[first].tensors["log_probs"].numel() == 0
    destination.accept(through_a_store(popped(source, [], FIELDS)))
    assert len(destination) == 2


def test_no_field_moves_the_samples_alone() -> None:
    source, samples = filled([(1, 2), (3, 4)])
    destination = SampleStore()
    destination.accept(through_a_store(popped(source, list(samples), ())))
    assert [destination[id].response_tokens for id in samples] == [2, 4]


def test_read_only_memory_is_shared_without_a_warning_and_without_a_copy() -> None:
    source, samples = filled([(1, 2), (3, 4)])
    parcel = through_a_store(popped(source, list(samples), FIELDS))
    column = parcel.columns["tokens"]
    assert not column.flags.writeable
    destination = SampleStore()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        destination.accept(parcel)
    first = destination[next(iter(samples))].tensors["tokens"]
    assert first.data_ptr() == column.__array_interface__["data"][0]
    assert isinstance(column, np.ndarray)


def test_what_was_packed_is_no_longer_the_sender_s_memory() -> None:
    source, samples = filled([(1, 2), (3, 4)])
    ids = list(samples)
    parcel = popped(source, ids, FIELDS)
    samples[ids[0]].tensors["tokens"].fill_(-1)
    assert parcel.columns["tokens"].min() >= 0


def test_a_sample_that_is_made_twice_is_a_bug() -> None:
    source, samples = filled([(1, 2)])
    (id,) = samples
    with pytest.raises(AssertionError, match="stored already"):
        source.add(id, sample(1, 2))


def test_what_is_published_stays_and_comes_in_parts() -> None:
    """Tokens from the rank that made them, a later field from another, one sample of several."""
    source, samples = filled([(1, 2), (3, 4)])
    first, second = samples
    parcel = through_a_store(source.pack(list(samples), ("tokens",), with_items=True))
    assert len(source) == 2
    between, destination = SampleStore(), SampleStore()
    between.accept(parcel)
    between[second].tensors["late"] = torch.tensor([0.5])
    late = through_a_store(between.pack([second], ("late",)))
    for arriving in (parcel, late):
        destination.accept(arriving, only=[second])
    assert len(destination) == 1
    assert torch.equal(destination[second].tensors["tokens"], samples[second].tensors["tokens"])
    assert destination[second].tensors["late"].item() == 0.5
    assert destination[second].item is not None
    source.accept(late, only=[second])  # back to where an old copy lies
    assert source[second].tensors.keys() >= {"tokens", "log_probs", "late"}
    assert first not in destination._samples


def test_whole_samples_travel_with_all_that_each_has() -> None:
    source, samples = filled([(1, 2), (3, 4)])
    first, second = samples
    source[second].tensors["late"] = torch.tensor([0.5])
    destination = SampleStore()
    for parcel in source.pack_whole([first, second]):
        destination.accept(through_a_store(parcel))
    assert len(source) == 2
    assert "late" in destination[second].tensors
    assert "late" not in destination[first].tensors
    assert destination[first].item is not None


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16])
def test_a_field_of_several_dimensions_keeps_its_shape(dtype: torch.dtype) -> None:
    """The experts of tokens [tokens - 1, layers, k]; some samples of a store have none."""
    source, samples = filled([(3, 5), (3, 1), (1, 70)])
    ids = list(samples)
    for id in ids[:2]:
        rows = len(samples[id].tensors["tokens"]) - 1
        experts = torch.randint(0, 200, (rows, 3, 2)).to(dtype)
        samples[id].tensors[ROUTED_EXPERTS] = experts
    destination = SampleStore()
    for parcel in source.pack_whole(ids):
        destination.accept(through_a_store(parcel))
    for id in ids[:2]:
        got, wanted = (x.tensors[ROUTED_EXPERTS] for x in (destination[id], samples[id]))
        assert got.dtype == dtype
        assert got.shape == wanted.shape
        assert torch.equal(got.long(), wanted.long())
    assert ROUTED_EXPERTS not in destination[ids[2]].tensors
