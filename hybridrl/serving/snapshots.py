"""The snapshots that the ranks keep for sampling, and which of them go first."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridrl.serving.requests import CheckpointPath


@dataclass(slots=True)
class Snapshot:
    """Weights under a `version` that no others have; `path` None is the base model.

    They can be read again from a `folder`, unless that is None; the base is read from its file. A
    snapshot that is not `here` is read before it generates. `open` requests want samples of it.
    """

    version: int
    path: str | None
    folder: Path | None = None
    here: bool = False
    open: int = 0

    @property
    def model(self) -> str | None:
        """The model whose weights they are; None: the base."""
        return None if self.path is None else CheckpointPath.parse(self.path).model

    @property
    def returns(self) -> bool:
        """Whether it can be read again once it has been dropped."""
        return self.path is None or self.folder is not None


class Snapshots:
    """Snapshots by path, at most `most` of them on the ranks: another comes where it `has_room`.

    Invariant: a snapshot that `dropped` gives has no open request and is not here any more; one
    that cannot be read again is forgotten with it, and its path is among the `gone`.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.gone: set[str] = set()
        self._versions = itertools.count(1)
        self._by_version: dict[int, Snapshot] = {}  # the last sampled one last
        self._version_of: dict[str | None, int] = {}

    def __getitem__(self, version: int) -> Snapshot:
        return self._by_version[version]

    def get(self, path: str | None) -> Snapshot | None:
        """The snapshot of a path, if it is known."""
        version = self._version_of.get(path)
        return None if version is None else self._by_version[version]

    def add(self, path: str | None, folder: Path | None, here: bool) -> Snapshot:
        """A new snapshot, which takes its path from an older one; see `detach`."""
        self.detach(path)
        snapshot = Snapshot(next(self._versions), path, folder, here)
        self._by_version[snapshot.version] = snapshot
        self._version_of[path] = snapshot.version
        return snapshot

    def sampled(self, snapshot: Snapshot) -> None:
        """It is the last sampled one from now on."""
        self._by_version[snapshot.version] = self._by_version.pop(snapshot.version)

    def detach(self, path: str | None) -> None:
        """Let the snapshot of a path have it no more: its files are gone, or are others.

        It goes once its open requests are answered, from memory; it cannot be read again.
        """
        if path is not None:
            self.gone.discard(path)
        if (version := self._version_of.pop(path, None)) is not None:
            snapshot = self._by_version[version]
            snapshot.folder = None
            if not (snapshot.here or snapshot.open):
                del self._by_version[version]

    def closed(self, snapshot: Snapshot) -> None:
        """Forget a snapshot that has no open request, if it is not here and has lost its path."""
        if not snapshot.here and self._version_of.get(snapshot.path) != snapshot.version:
            del self._by_version[snapshot.version]

    def unload(self, model: str) -> None:
        """Detach the snapshots of a model that are in memory alone: no client asks for them."""
        own = f"tinker://{model}/"
        self.gone = {path for path in self.gone if not path.startswith(own)}
        for path in [x for x in self._version_of if x is not None and x.startswith(own)]:
            if self._by_version[self._version_of[path]].folder is None:
                self.detach(path)

    @property
    def has_room(self) -> bool:
        """Whether another one can come: some place is free, or one has no open request."""
        return sum(one.here and one.open > 0 for one in self._by_version.values()) < self.most

    def dropped(self, coming: int = 0) -> Iterator[Snapshot]:
        """The snapshots to drop from the ranks: those without a path, then those beyond `most`.

        Of these the ones go first that can be read again. There is room for so many `coming` ones
        afterwards, where it `has_room`.
        """
        idle = [one for one in self._by_version.values() if one.here and not one.open]
        replaced = [one for one in idle if self._version_of.get(one.path) != one.version]
        number = sum(one.here for one in self._by_version.values()) - len(replaced)
        others = sorted((x for x in idle if x not in replaced), key=lambda x: not x.returns)
        for snapshot in [*replaced, *others[: max(0, number + coming - self.most)]]:
            snapshot.here = False
            is_latest = self._version_of.get(snapshot.path) == snapshot.version
            if not (is_latest and snapshot.returns):
                del self._by_version[snapshot.version]
                if is_latest:
                    assert snapshot.path is not None
                    del self._version_of[snapshot.path]
                    self.gone.add(snapshot.path)
            yield snapshot
