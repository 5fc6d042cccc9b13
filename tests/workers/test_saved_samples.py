"""The file of finished samples of one rank: what is written into it, when, and how it is read."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hybridrl.checkpoint.sample_records import scan
from hybridrl.data import Item
from hybridrl.flow.executor import Finished
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.flow.saved_samples import SaveFinished
from hybridrl.workers.saved_samples import SavedSamples, take_saved
from hybridrl.workers.store import KEPT_IDS, ROUTED_EXPERTS, SampleStore, StoredSample

ITEM = Item("p", (5, 6), "", (), "source", {})
SPANS = (TokenSpan(0, 2, 4), TokenSpan(2, 3, 4, recomputed=True))


def sample(k: int, finish: str = "stop") -> tuple[Finished, StoredSample]:
    tensors = {
        "tokens": torch.tensor([5, 6, 7 + k, 8, 9]),
        "log_probs": torch.tensor([-0.5, -0.25, -1e-8 * k]),
        ROUTED_EXPERTS: torch.arange(16, dtype=torch.int16).reshape(4, 2, 2),
        KEPT_IDS: torch.tensor([1, 2, 3], dtype=torch.int32),
    }
    more = (ROUTED_EXPERTS, KEPT_IDS)
    return Finished(SampleId(3, "b", k), 1, 2, 3, finish, SPANS, more), StoredSample(
        3, ITEM, tensors
    )


def save(saved: SavedSamples, k: int, finish: str = "stop") -> None:
    finished, stored = sample(k, finish)
    saved.append(finished, 4, stored)


def ks(file: Path) -> list[int]:
    return [facts["id"][2] for _, facts in scan(file)[0]]


def test_a_sample_is_in_the_file_once_it_is_finished_and_comes_back_whole(tmp_path: Path) -> None:
    saved, folder = SavedSamples(1), tmp_path / "run" / "step_000003"
    saved.begin_call(SaveFinished(str(folder), 2))
    assert not folder.exists()
    save(saved, 0)
    file = folder / "rank_0001_2.records"
    assert ks(file) == [0]  # with the file still open
    save(saved, 1)
    assert ks(file) == [0, 1]
    saved.close()
    store = SampleStore()
    place, facts = scan(file)[0][1]
    assert (facts["version"], facts["response_tokens"]) == (4, 3)
    id = SampleId(3, "b", 1)
    taken = take_saved(id, place, ITEM, store, 0)
    finished, stored = sample(1)
    assert taken == Finished(**{x: getattr(finished, x) for x in _FIELDS} | {"rank": 0})
    assert (store[id].response_tokens, store[id].item) == (3, ITEM)
    assert store[id].tensors.keys() == stored.tensors.keys()
    for name, tensor in stored.tensors.items():
        assert store[id].tensors[name].dtype == tensor.dtype
        assert torch.equal(store[id].tensors[name], tensor)


_FIELDS = Finished.__dataclass_fields__


def test_what_is_outside_of_a_step_is_not_saved_nor_what_the_engine_gave_up(tmp_path: Path) -> None:
    saved, into = SavedSamples(1), SaveFinished(str(tmp_path), 1)
    save(saved, 0)  # before any call
    saved.begin_call(into)
    save(saved, 1, "abort")
    save(saved, 2, "length")
    saved.begin_call(None)  # an evaluation's
    save(saved, 3)
    saved.begin_call(into)
    save(saved, 4)
    saved.begin_call(SaveFinished(str(tmp_path / "next"), 1))
    save(saved, 5)
    saved.close()
    assert ks(tmp_path / "rank_0001_1.records") == [2, 4]
    assert ks(tmp_path / "next" / "rank_0001_1.records") == [5]


def test_a_full_disk_is_said_once_a_step_and_costs_no_more_than_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved = SavedSamples(1)
    saved.begin_call(SaveFinished(str(tmp_path / "a"), 1))
    save(saved, 0)
    write = os.write

    def no_room(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    def cut(file: int, data: bytes) -> int:
        return write(file, data[:20])

    failing: list[tuple[Any, str, str]] = [
        (no_room, "b", "No space left on device"), (cut, "c", "20 of "),
    ]  # fmt: skip
    for fails, folder, why in failing:
        monkeypatch.setattr(os, "write", fails)
        saved.begin_call(SaveFinished(str(tmp_path / folder), 1))
        save(saved, 1)
        save(saved, 2)
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith(f"{tmp_path / folder}: {why}")
        assert line.endswith("; finished samples of the step are not saved")
        monkeypatch.undo()
        save(saved, 3)  # of the same step
        assert ks(tmp_path / folder / "rank_0001_1.records") == []
        caplog.clear()
    saved.begin_call(SaveFinished(str(tmp_path / "d"), 1))
    save(saved, 4)
    assert ks(tmp_path / "d" / "rank_0001_1.records") == [4]
