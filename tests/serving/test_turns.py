"""Whose turn it is, which snapshots stay, and checkpoints as files: without ranks."""

import json
from pathlib import Path

import pytest

from hybridrl.serving.checkpoints import CheckpointFiles
from hybridrl.serving.requests import CheckpointPath, Refused
from hybridrl.serving.snapshots import Snapshots
from hybridrl.serving.turns import TRAIN, next_place

TURNS = {
    "there is work, and nobody else waits": (1, {1: 0.0}, 1),
    "others wait, but not long": (1, {1: 0.0, 2: 9.0, TRAIN: 8.5}, 1),
    "one has waited too long": (1, {1: 9.9, 2: 9.0, TRAIN: 7.0}, TRAIN),
    "of several the longest": (TRAIN, {TRAIN: 0.0, 2: 6.0, 3: 5.0}, 3),
    "no work is left": (1, {2: 9.9, 3: 9.8}, 3),
    "of two as long the first": (1, {2: 9.0, TRAIN: 9.0}, TRAIN),
}


@pytest.mark.parametrize("case", TURNS)
def test_the_ranks_stay_while_there_is_work_and_patience(case: str) -> None:
    present, waiting_since, expected = TURNS[case]
    assert next_place(present, waiting_since, now=10.0, patience_s=2.0) == expected


def test_work_of_every_place_has_its_turn() -> None:
    """Three places with endless work: each is left within its time, and none is left out."""
    waiting, place, since = [TRAIN, 1, 2], TRAIN, dict.fromkeys([TRAIN, 1, 2], 0.0)
    visits = []
    for now in range(1, 40):
        following = next_place(place, since, float(now), patience_s=3.0)
        if following != place:
            since[place] = float(now)
            visits.append(following)
        place = following
    assert len(visits) >= 9
    assert all({*visits[i : i + 3]} == {*waiting} for i in range(len(visits) - 3))


def test_the_last_sampled_snapshots_stay() -> None:
    snapshots = Snapshots(2)
    one, two, three = (snapshots.add(name, None, here=True) for name in ("a", "b", "c"))
    snapshots.sampled(one)
    two.open = 1
    assert [x.path for x in snapshots.dropped()] == ["c"]
    assert snapshots.gone == {"c"}
    assert snapshots.get("c") is None
    assert not three.here
    two.open, kept = 0, snapshots.add("d", Path("there"), here=True)
    assert [x.path for x in snapshots.dropped()] == ["d"]
    assert snapshots.get("d") is kept  # to be read again
    assert "d" not in snapshots.gone
    snapshots.sampled(one)
    snapshots.add("e", None, here=True)
    assert [x.path for x in snapshots.dropped()] == ["b"]


def test_a_snapshot_that_is_replaced_lives_while_it_is_sampled() -> None:
    snapshots = Snapshots(9)
    old = snapshots.add("a", None, here=True)
    old.open = 1
    new = snapshots.add("a", None, here=True)
    assert snapshots.get("a") is new
    assert not list(snapshots.dropped())
    old.open = 0
    assert list(snapshots.dropped()) == [old]
    assert not snapshots.gone


def test_snapshots_with_files_go_first() -> None:
    """They can be read again, also where they are the last sampled ones."""
    snapshots = Snapshots(1)
    snapshots.add("memory", None, here=True)
    snapshots.add("files", Path("there"), here=True)
    assert [one.path for one in snapshots.dropped()] == ["files"]


def test_a_snapshot_whose_files_are_gone_or_others_loses_its_path() -> None:
    """Its open requests are answered from memory; one that would be read first is not."""
    snapshots = Snapshots(9)
    idle = snapshots.add("a", Path("a"), here=True)
    snapshots.detach("a")
    assert snapshots.get("a") is None
    assert list(snapshots.dropped()) == [idle]
    asked = snapshots.add("a", Path("a"), here=True)
    asked.open = 1
    unread = snapshots.add("b", Path("b"), here=False)
    unread.open = 1
    for path in "ab":
        snapshots.detach(path)
    assert not list(snapshots.dropped())
    assert unread.folder is None
    asked.open = 0
    assert list(snapshots.dropped()) == [asked]


def test_checkpoints_are_listed_deleted_and_expire(tmp_path: Path) -> None:
    now = [100.0]
    files = CheckpointFiles(tmp_path, lambda: now[0])
    paths = [CheckpointPath.parse(f"tinker://{m}/{k}/x") for m in "ab" for k in KINDS]
    for path in paths:
        with files.writing(path, files.record("base", "all", 4, 7, None), False) as folder:
            folder.mkdir()
            (folder / "weights").write_bytes(b"12345")
            assert not files.has(path)
        now[0] += 1
    assert [one.path for one in files.all(None)] == [str(path) for path in paths]
    assert [one.path for one in files.all("b")] == [str(path) for path in paths[2:]]
    assert files.all("a")[0].bytes == 5
    with pytest.raises(Refused, match="there is a checkpoint of that name"):
        files.writing(paths[0], files.record("base", "all", 4, 8, None), False).__enter__()
    with files.writing(paths[0], files.record("base", "all", 4, 8, None), True) as folder:
        folder.mkdir()
        assert files.read(paths[0]).steps == 7  # until the new one is whole
        assert len(files.all("a")) == 2
    files.delete(paths[1])
    files.expire(paths[2], 5.0)
    assert files.read(paths[2]).expires == now[0] + 5
    assert files.read(paths[2]).steps == 7
    now[0] += 5
    with pytest.raises(Refused, match=r"^tinker://b/weights/x: there is no such checkpoint$"):
        files.read(paths[2])
    assert not files.folder(paths[2]).exists()
    assert [one.path for one in files.all(None)] == [str(paths[3]), str(paths[0])]
    record = json.loads((files.folder(paths[0]) / "checkpoint.json").read_text())
    assert record["steps"] == 8


def test_a_checkpoint_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    """An older one of its name stays."""
    files, path = CheckpointFiles(tmp_path), CheckpointPath.parse("tinker://a/weights/x")
    for older in (0, 1):
        for error in (Refused("the disk is full"), OSError("of a rank")):
            with pytest.raises(type(error), match=str(error)):
                _write(files, path, steps=2, error=error)
            assert len(list(files.folder(path).parent.iterdir())) == older
        _write(files, path, steps=1)
    assert files.read(path).steps == 1
    files.folder(path).joinpath("checkpoint.json").write_text("{}")
    assert not files.all(None)
    with pytest.raises(Refused, match="there is a checkpoint of that name"):
        _write(files, path, overwrite=False)


def _write(
    files: CheckpointFiles,
    path: CheckpointPath,
    *,
    steps: int = 1,
    overwrite: bool = True,
    error: Exception | None = None,
) -> None:
    with files.writing(path, files.record("base", "all", 4, steps, None), overwrite) as folder:
        folder.mkdir()
        (folder / "weights").touch()
        if error is not None:
            raise error


KINDS = ("weights", "sampler_weights")
