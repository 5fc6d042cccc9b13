"""What fails one request alone, whatever fails in it: on ranks that compute nothing."""

import asyncio
import re
import signal
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from serve_backends import FakeBackend
from serve_ranks import DATUM, IDS, SERVED, FakeRanks, answered, taken, turns_of

from hybridrl.config import ServeConfig
from hybridrl.serving.checkpoints import CheckpointFiles
from hybridrl.serving.loop import Turns
from hybridrl.serving.requests import (
    CreateModel,
    Delete,
    DropSamples,
    Expire,
    ForwardBackward,
    LoadModel,
    OptimStep,
    Refused,
    SampleRequest,
    Samples,
    SampleSettings,
    Save,
    Saved,
    Unload,
)
from hybridrl.serving.server import in_thread, listener

GRADIENT = ForwardBackward("a", (DATUM,), "cross_entropy", {}, True)
STEP = OptimStep("a", 1e-3, 0.9, 0.95, 1e-8, 0.0, 0.0)


def sampled(weights: str | None, number: int = 0, session: str = "s") -> SampleRequest:
    """A request for one sample."""
    return SampleRequest(weights, IDS, 1, SampleSettings(max_tokens=4), (0, number), session)


def with_model(ranks: FakeRanks, run_dir: Path, **own: Any) -> Turns:
    """A loop with a model `a`."""
    turns = turns_of(ranks, run_dir, **own)
    answered(turns, CreateModel("a"))
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
        answered(turns, CreateModel("b", source="tinker://a/weights/x"))
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


@pytest.mark.parametrize(
    ("served", "line"),
    [
        ({"most_models": 1}, "a node's memory holds 1 models at once beside serve.snapshots=3; a"),
        ({"lora_rank": 0}, "actor.lora.rank=0 serves all weights of one model, now a"),
    ],
)
def test_a_model_too_many_is_refused(tmp_path: Path, served: dict[str, Any], line: str) -> None:
    """Until another has ended."""
    turns = with_model(FakeRanks(), tmp_path, served=replace(SERVED, **served), snapshots=3)
    with pytest.raises(Refused, match=re.escape(line)):
        answered(turns, CreateModel("b"))
    answered(turns, Unload("a"))
    answered(turns, CreateModel("b"))


@pytest.mark.parametrize("other", [{"name": "larger"}, {"trained": "adapters of rank 8"}])
def test_a_checkpoint_of_other_weights_is_neither_loaded_nor_sampled(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    """Its base model is another, or its adapters are."""
    ranks, path = FakeRanks(), "tinker://a/weights/x"
    answered(
        with_model(ranks, tmp_path, served=replace(SERVED, **other)), Save("a", "x", "weights")
    )
    turns = with_model(ranks, tmp_path)
    requests = sampled(path), LoadModel("a", path, False), CreateModel("b", source=path)
    for request in requests:
        with pytest.raises(Refused, match=rf"^{path} has .*; this server trains adapters of tiny"):
            answered(turns, request)
    assert not ranks.called("read_snapshot")
    assert not ranks.called("load_model")


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
@pytest.mark.parametrize("change", ["replaced", "deleted"])
def test_samples_of_a_path_are_those_of_its_present_files(
    tmp_path: Path, kind: Any, change: str
) -> None:
    ranks, path = FakeRanks(), f"tinker://a/{kind}/x"
    turns = with_model(ranks, tmp_path)
    answered(turns, Save("a", "x", kind))
    answered(turns, sampled(path))
    (first,) = ranks.called("generate_with")
    if change == "deleted":
        answered(turns, Delete(path))
        with pytest.raises(Refused, match="there is no such checkpoint"):
            answered(turns, sampled(path, 1))
    else:
        answered(turns, Save("a", "x", kind, overwrite=True))
        answered(turns, sampled(path, 1))
        assert ranks.called("generate_with")[1] != first
        assert first in [[version] for (version,) in ranks.called("drop_snapshot")]


def test_snapshots_in_memory_go_with_their_model(tmp_path: Path) -> None:
    """One with open requests goes when these are answered; files stay."""
    ranks = FakeRanks()
    turns = with_model(ranks, tmp_path)
    for name in ("idle", "open"):
        answered(turns, Save("a", name, "sampler_weights", files=False))
    answered(turns, Save("a", "files", "sampler_weights"))
    ranks.draws = False
    request = taken(turns, sampled("tinker://a/sampler_weights/open"))
    turns.work()
    unloaded = taken(turns, Unload("a"))
    turns._left_training = turns._since[turns.place] = -1e9  # patience is over
    turns.training[0].since = -2e9
    turns.work()
    unloaded.result(0)
    assert ranks.called("drop_snapshot") == [[1]]
    ranks.draws = True
    while turns.work():
        pass
    assert isinstance(request.result(0), Samples)
    assert ranks.called("drop_snapshot") == [[1], [2]]
    assert isinstance(answered(turns, sampled("tinker://a/sampler_weights/files", 1)), Samples)


def test_snapshots_are_never_more_than_the_bound(tmp_path: Path) -> None:
    """One goes before another comes. Where none can go a sample and a save wait."""
    ranks, here, peaks = FakeRanks(), set[int](), list[int]()

    def comes(version: int, _: object) -> str:
        here.add(version)
        peaks.append(len(here))
        return ""

    ranks.answers |= {"take_snapshot": comes, "read_snapshot": comes, "drop_snapshot": here.remove}
    turns = with_model(ranks, tmp_path, snapshots=2, patience_s=0)
    paths = [f"tinker://a/sampler_weights/{name}" for name in "xyz"]
    for name in "xyz":
        answered(turns, Save("a", name, "sampler_weights"))
    answered(turns, sampled(paths[0]))
    read = ranks.called("read_snapshot")
    ranks.draws = False
    futures = [taken(turns, sampled(path, 1)) for path in paths]
    saved = taken(turns, Save("a", "w", "sampler_weights"))
    for _ in range(20):
        turns.work()
    assert not saved.done()
    assert not futures[1].done()
    assert ranks.called("read_snapshot") == read
    assert not (tmp_path / "models" / "a" / "sampler_weights" / "w").exists()
    ranks.draws = True
    while turns.work():
        pass
    assert all(isinstance(future.result(0), Samples) for future in futures)
    assert len(ranks.called("read_snapshot")) == len(read) + 1
    assert isinstance(saved.result(0), Saved)
    assert isinstance(answered(turns, sampled(paths[1], 2)), Samples)
    assert max(peaks) == 2


def test_work_that_brings_no_snapshot_runs_while_others_wait_for_room(tmp_path: Path) -> None:
    """Training of another model, and a prompt of a snapshot that is here, go first."""
    ranks = FakeRanks()
    served = replace(SERVED, sampler_scores=False)
    turns = with_model(ranks, tmp_path, served=served, snapshots=1, patience_s=0)
    answered(turns, CreateModel("b"))
    for name in "xy":
        answered(turns, Save("a", name, "sampler_weights"))
    ranks.draws = False
    here, other = (f"tinker://a/sampler_weights/{name}" for name in "yx")
    begun = taken(turns, sampled(here))
    turns.work()
    saved = taken(turns, Save("a", "z", "sampler_weights"))
    scored = [replace(sampled(path, 1), prompt_logprobs=True) for path in (other, here)]
    waits, prompt = (taken(turns, request) for request in scored)
    gradient = taken(turns, replace(GRADIENT, model="b"))
    for _ in range(20):
        turns.work()
    assert gradient.result(0)
    assert not any(future.done() for future in (begun, saved, waits, prompt))
    assert [model for model, _ in ranks.called("add_gradient")] == [2, "b"]
    ranks.draws = True
    while turns.work():
        pass
    assert isinstance(saved.result(0), Saved)
    assert all(isinstance(one.result(0), Samples) for one in (begun, waits, prompt))


def test_what_waits_for_a_model_goes_with_its_session(tmp_path: Path) -> None:
    """Other models' requests run, and no rank sees what is dropped."""
    ranks = FakeRanks()
    turns = with_model(ranks, tmp_path)
    answered(turns, CreateModel("b"))
    waiting = [taken(turns, request) for request in (GRADIENT, STEP)]
    other = taken(turns, replace(GRADIENT, model="b"))
    answered(turns, Unload("a"))
    for future in waiting:
        with pytest.raises(Refused, match=r"^a: the session has ended$"):
            future.result(0)
    assert other.result(0)
    assert not ranks.called("step_model")
    assert ranks.called("drop_model") == [["a"]]


def test_samples_go_with_their_session(tmp_path: Path) -> None:
    """Samples that are begun, that wait, and of a path that was deleted meanwhile."""
    ranks = FakeRanks()
    turns = with_model(ranks, tmp_path)
    paths = [f"tinker://a/sampler_weights/{name}" for name in ("begun", "waits", "deleted")]
    for path in paths:
        answered(turns, Save("a", path.rpartition("/")[2], "sampler_weights"))
    ranks.draws = False
    begun = taken(turns, sampled(paths[0]))
    other = taken(turns, sampled(paths[0], session="other"))
    turns.work()
    left = [begun, *(taken(turns, sampled(path)) for path in [*paths, None])]
    turns.take(Delete(paths[2]), Future())
    dropped = taken(turns, DropSamples("s", "finished"))
    assert {*turns.open()} == {*left, other, dropped}
    turns.work()
    assert dropped.result(0)
    for future in left:
        with pytest.raises(Refused, match=r"^session s: finished$"):
            future.result(0)
    assert ranks.called("drop_samples") == [[frozenset({0})]]
    assert ranks.called("drop_snapshot") == [[3]]  # that of the deleted path
    assert [*turns.open()] == [other]
    ranks.draws = True  # the ranks may have drawn the last token of a sample before
    while turns.work():
        pass
    assert other.result(0)
    assert turns.sampling._load == [0]
    assert answered(turns, sampled(None, 1))


def test_responses_are_scored_by_the_snapshot_that_drew_them(tmp_path: Path) -> None:
    """A response may end as the ranks change to another snapshot."""
    ranks = FakeRanks()
    turns = with_model(ranks, tmp_path)
    paths = [f"tinker://a/sampler_weights/{name}" for name in "xy"]
    for name in "xy":
        answered(turns, Save("a", name, "sampler_weights"))
    scored, other = (replace(sampled(path), topk_logprobs=2) for path in paths)
    ranks.draws = False
    waiting = taken(turns, scored)
    unscored = taken(turns, sampled(paths[0], 1))
    turns.work()
    ranks.draws = True
    of_other = taken(turns, other)
    turns._since[2] = -1e9  # patience is over
    turns.work()
    assert unscored.result(0)
    assert of_other.result(0)
    assert not waiting.done()
    while turns.work():
        pass
    assert waiting.result(0)
    calls = [name if name == "score" else args for name, *args in ranks.asked if name in CALLS]
    assert calls == [[1], [2], "score", [1], "score"]


CALLS = "generate_with", "score"


@dataclass
class StuckBackend(FakeBackend):
    """A backend whose end never comes."""

    async def close(self) -> None:
        await asyncio.Event().wait()


def test_an_exception_during_the_end_ends_it() -> None:
    """A second signal, say: no thread is left, nor any that keeps the process."""
    settings, before = ServeConfig(port=0), threading.active_count()
    bound, main = listener(settings), threading.get_ident()
    interrupt = partial(signal.pthread_kill, main, signal.SIGINT)
    server = in_thread(settings, StuckBackend(), "tml-" + "0" * 32, bound)
    server.__enter__().api.refuse_new = lambda line: interrupt()  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        server.__exit__(None, None, None)
    bound.close()
    assert threading.active_count() == before
