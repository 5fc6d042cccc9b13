"""A GPU's ways on a CPU: whole pages, one copy up, tokens that stay on the device."""

from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch

from hybridrl.engines.rollout import batch, logit_edits, sampling
from hybridrl.engines.rollout.device_copies import Array, Download, pack, unpack, upload
from hybridrl.engines.rollout.interface import Output, Request
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.speculation import make_speculation
from hybridrl.models import paged_attention
from hybridrl.models.paged_attention import KVCache, PagedBatch
from hybridrl.models.shard import GenParallel

BLOCK = 4


class Seen:
    """What passes have read: the keys of groups with one query, and how many were cut."""

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.cut = self.uploads = 0


@pytest.fixture
def as_on_gpus(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Engines on this CPU take a GPU's ways, and note what they do."""
    seen = Seen()
    attend, at_once = PagedBatch.attend, KVCache.rows_at_once

    def noted(self: PagedBatch, layer: int, *args: object) -> torch.Tensor:
        for group in self.groups if layer == 0 else ():
            assert group.workspace is None
            if group.queries == 1:
                seen.keys.append(group.keys)
        return attend(self, layer, *args)  # type: ignore[arg-type]

    def noted_rows(self: KVCache, rows: int, pages: int) -> int:
        most = at_once(self, rows, pages)
        seen.cut += most < rows
        return most

    def in_one_copy(arrays: Mapping[str, Array], device: torch.device) -> dict[str, torch.Tensor]:
        seen.uploads += 1
        return unpack(torch.from_numpy(pack(arrays)), arrays)

    monkeypatch.setattr(paged_attention, "reads_whole_pages", lambda device: True)
    monkeypatch.setattr(PagedBatch, "attend", noted)
    monkeypatch.setattr(KVCache, "rows_at_once", noted_rows)
    for module in (batch, logit_edits, sampling):
        monkeypatch.setattr(module, "upload", in_one_copy)
    return seen


@pytest.mark.parametrize("name", ["qwen3", "mistral", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9, "top_k": 20}, {"repetition_penalty": 1.2}])
def test_tokens_are_those_of_a_cpu(
    name: str,
    settings: dict[str, float],
    make_model: Callable[..., object],
    make_engine: Callable[..., NativeEngine],
    requests_of: Callable[..., list[Request]],
    finish: Callable[..., dict[object, Output]],
    same: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Rows that share a prompt may be more than what the cache has memory to gather."""
    model, options = make_model(name), {"kv_cache_tokens": 160}
    wanted = finish(make_engine(model, **options), requests_of(24, 4, True, **settings))
    seen: Seen = request.getfixturevalue("as_on_gpus")
    engine = make_engine(model, **options)
    monkeypatch.setattr(engine._filler, "_keeps", False)
    same(finish(engine, requests_of(24, 4, True, **settings)), wanted)
    assert seen.keys
    assert not any(keys % BLOCK for keys in seen.keys)
    assert seen.cut
    assert seen.uploads


def test_drafts_are_verified_alike(
    model: object,
    make_engine: Callable[..., NativeEngine],
    requests_of: Callable[..., list[Request]],
    finish: Callable[..., dict[object, Output]],
    same: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    wanted = finish(make_engine(model), requests_of(12, 4))
    request.getfixturevalue("as_on_gpus")
    engine = make_engine(model, speculation=make_speculation(3, GenParallel()))
    monkeypatch.setattr(engine._filler, "_keeps", False)
    same(finish(engine, requests_of(12, 4)), wanted)
    assert engine.stats().accepted_tokens


def test_a_strict_engine_is_bitwise_the_same_in_any_company(
    model: object,
    make_engine: Callable[..., NativeEngine],
    requests_of: Callable[..., list[Request]],
    finish: Callable[..., dict[object, Output]],
    as_on_gpus: Seen,
) -> None:
    """Keys are padded by a sequence's own length."""
    together = finish(make_engine(model, deterministic=True), requests_of(6))
    for alone in requests_of(6):
        (output,) = finish(make_engine(model, deterministic=True), [alone]).values()
        assert output.token_ids == together[alone.id].token_ids
        assert output.log_probs == together[alone.id].log_probs
    assert as_on_gpus.keys


def test_what_is_gathered_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer more than the cache; a cache of other heads that shares it has as much."""
    monkeypatch.setattr(paged_attention, "reads_whole_pages", lambda device: True)
    cpu = torch.device("cpu")
    cache = KVCache(2, 6, BLOCK, 2, 3, torch.float32, cpu)
    lent = KVCache(2, 12, BLOCK, 1, 3, torch.float32, cpu, lender=cache)
    for own, heads in ((cache, 2), (lent, 1)):
        new = torch.randn(2, 2, heads, 3)
        places = torch.tensor([3, 5]), torch.tensor([1, 0])
        own.write(1, places, new)
        before = own.blocks.clone()
        for _ in range(2):
            tables = torch.tensor([[3, 0], [5, 1]])
            kept = own.gather(1, own.pages(tables))
            assert kept.shape == (2, 2, heads, 2 * BLOCK, 3)
            assert torch.equal(kept[:, 0, :, 1], new[0])
            assert torch.equal(kept[:, 1, :, 0], new[1])
            assert own.gather(0, own.pages(tables)).data_ptr() == kept.data_ptr()
        assert torch.equal(own.blocks, before)
        assert own.rows_at_once(9, 2) == own.blocks.shape[1] // 2
        with pytest.raises(RuntimeError):  # a batch is cut before
            own.gather(1, own.pages(torch.zeros(9, 2, dtype=torch.int64)))
    assert cache.keys(5) == 8


def test_arrays_of_all_types_are_packed_into_one() -> None:
    arrays: dict[str, Array] = {
        "bytes": np.array([True, False, True]),
        "floats": np.array([0.1, 0.2], np.float32)[::-1],
        "none": np.zeros((2, 0)),
        "table": np.arange(12).reshape(3, 4)[:, 1:3],
        "uniforms": np.array([1 / 3]),
    }
    for sent in (
        unpack(torch.from_numpy(pack(arrays)), arrays),
        upload(arrays, torch.device("cpu")),
    ):
        assert sent.keys() == arrays.keys()
        for name, array in arrays.items():
            assert torch.equal(sent[name], torch.from_numpy(array.copy()))


def test_a_download_has_what_was_computed() -> None:
    tensors = [torch.arange(3), torch.rand(2)]
    waited = Download(tensors).wait()
    assert all(torch.equal(a, b) for a, b in zip(waited, tensors, strict=True))
