"""What fails one request alone, whatever fails in it: on ranks that compute nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve_ranks import SERVED, FakeRanks, answered, taken, turns_of

from hybridrl.serving.checkpoints import CheckpointFiles
from hybridrl.serving.loop import Turns
from hybridrl.serving.requests import (
    CreateModel,
    Datum,
    Expire,
    ForwardBackward,
    LoadModel,
    OptimStep,
    Refused,
    SampleRequest,
    Samples,
    SampleSettings,
    Save,
    Unload,
)

IDS = np.arange(3, dtype=np.int32)
GRADIENT = ForwardBackward(
    "a", (Datum(IDS, IDS, {"weights": np.ones(3, np.float32)}),), "cross_entropy", {}, True
)
STEP = OptimStep("a", 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0)


def sampled(weights: str | None, number: int = 0) -> SampleRequest:
    """A request for one sample."""
    return SampleRequest(weights, IDS, 1, SampleSettings(max_tokens=4), (0, number))


def with_model(ranks: FakeRanks, run_dir: Path, **own: Any) -> Turns:
    """A loop with a model `a`."""
    turns = turns_of(ranks, run_dir, **own)
    answered(turns, CreateModel("a", turns.served.lora_rank))
    return turns


def test_an_error_while_a_request_is_taken_fails_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = with_model(FakeRanks(), tmp_path)
    monkeypatch.setattr(CheckpointFiles, "expire", lambda *_: 1 / 0)
    failed = taken(turns, Expire("tinker://a/weights/x", None))
    with pytest.raises(ZeroDivisionError):
        failed.result(0)
    answered(turns, Unload("a"))


def test_a_save_that_fails_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    """The client's next call runs, and an older checkpoint of that name stays."""
    ranks = FakeRanks()
    turns = with_model(ranks, tmp_path)
    answered(turns, Save("a", "x", "weights"))

    def full(model: str, folder: str, state: bool) -> str:
        Path(folder).mkdir()
        return "No space left on device"

    ranks.answers["save_model"] = full
    for name, overwrite in {"x": True, "y": False}.items():
        line = rf"^tinker://a/weights/{name} cannot be written: No space left on device$"
        with pytest.raises(Refused, match=line):
            answered(turns, Save("a", name, "weights", overwrite=overwrite))
    assert [each.name for each in (tmp_path / "models" / "a" / "weights").iterdir()] == ["x"]
    answered(turns, Unload("a"))


def test_a_load_that_fails_leaves_no_gradient(tmp_path: Path) -> None:
    ranks = FakeRanks(load_model="a file is cut off")
    turns = with_model(ranks, tmp_path)
    answered(turns, Save("a", "x", "weights"))
    answered(turns, GRADIENT)
    with pytest.raises(Refused, match=r"^tinker://a/weights/x cannot be read: a file is cut off$"):
        answered(turns, LoadModel("a", "tinker://a/weights/x", True))
    with pytest.raises(Refused, match="no gradient since the last one"):
        answered(turns, STEP)
    with pytest.raises(Refused, match="cannot be read: a file is cut off"):
        answered(turns, CreateModel("b", 4, source="tinker://a/weights/x"))
    assert list(turns.clients.models) == ["a"]


def test_a_snapshot_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    """Its next request reads again, and others are sampled meanwhile."""
    ranks = FakeRanks()
    answered(with_model(ranks, tmp_path), Save("a", "x", "weights"))
    ranks.answers["read_snapshot"] = lambda version, folder: "it is cut off" if folder else ""
    turns = turns_of(ranks, tmp_path)
    requests = [sampled("tinker://a/weights/x"), sampled(None), sampled("tinker://a/weights/x", 1)]
    futures = [taken(turns, request) for request in requests]
    while turns.work():
        pass
    for future in futures[::2]:
        with pytest.raises(Refused, match=r"^tinker://a/weights/x cannot be read: it is cut off$"):
            future.result(0)
    assert isinstance(futures[1].result(0), Samples)
    ranks.answers["read_snapshot"] = ""
    assert isinstance(answered(turns, sampled("tinker://a/weights/x", 2)), Samples)


@pytest.mark.parametrize("other", [{"name": "larger"}, {"trained": "adapters of rank 8"}])
def test_a_checkpoint_of_other_weights_is_neither_loaded_nor_sampled(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """Of another base model, or of adapters that another server had."""
    ranks, path = FakeRanks(), "tinker://a/weights/x"
    answered(with_model(ranks, tmp_path, served=replace(SERVED, **other)), Save("a", "x", "weights"))
    turns = with_model(ranks, tmp_path)
    requests = sampled(path), LoadModel("a", path, False), CreateModel("b", 4, source=path)
    for request in requests:
        with pytest.raises(Refused, match=rf"^{path} has .*; this server trains adapters of tiny"):
            answered(turns, request)
    assert not ranks.called("read_snapshot")
    assert not ranks.called("load_model")
