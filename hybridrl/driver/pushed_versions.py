"""The versions of the actor's weights that generation ranks can take, while instances need them."""

from collections.abc import Collection, Mapping, Sequence

from hybridrl.flow.executor import Load
from hybridrl.flow.sample import NO_VERSION
from hybridrl.workers.pushed_weights import PushedShare


class PushedVersions:
    """References to arrays in the data plane, by version, training rank and place.

    Arrays are pulled: whoever fills this otherwise (one-sided writes into reserved memory, say)
    gives a `Load` other references.
    """

    def __init__(self) -> None:
        self._shares: dict[int, Sequence[PushedShare]] = {}
        self.newest = NO_VERSION

    def __contains__(self, version: int) -> bool:
        return version in self._shares

    def of(self, versions: Collection[int]) -> dict[int, Sequence[PushedShare]]:
        """What all training ranks have pushed of these versions."""
        return {version: self._shares[version] for version in versions}

    def restore(self, by_version: Mapping[int, Sequence[PushedShare]]) -> None:
        """Older versions are there again."""
        self._shares |= by_version

    def add(self, shares: Sequence[PushedShare]) -> None:
        """All training ranks have pushed a version."""
        versions = {share.version for share in shares}
        assert len(versions) == 1, f"training ranks have pushed the versions {sorted(versions)}"
        (self.newest,) = versions
        self._shares[self.newest] = shares

    def loads(self, version: int, num_places: int) -> list[Load]:
        """The command for each place of an instance."""
        shares = self._shares[version]
        biases = next((share.biases for share in shares if share.biases is not None), None)
        return [
            Load(version, tuple(s.arrays[place] for s in shares if place in s.arrays), biases)
            for place in range(num_places)
        ]

    def keep(self, versions: Collection[int]) -> None:
        """Forget all but these and the newest: what nobody refers to leaves the data plane."""
        wanted = {*versions, self.newest}
        self._shares = {version: x for version, x in self._shares.items() if version in wanted}
