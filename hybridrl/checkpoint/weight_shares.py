"""Which rank writes which weights of a checkpoint, and into which files. Pure data.

Invariants, asserted by the tests:
1. every tensor of the checkpoint is in exactly one file, and every file has one writer;
2. tensors that are converted together have one writer;
3. the ranks of a pipeline stage write its tensors, unless the whole model fits into one file;
4. no writer has more than the mean of its stage and one largest conversion;
5. no file is larger than the bound, unless it has a single tensor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of the model, by `names`, that become those of a checkpoint together.

    `written` are the bytes of the results by their names in the checkpoint. Ranks of the pipeline
    `stage` hold the tensors.
    """

    names: Names
    written: Mapping[str, int]
    stage: int

    @property
    def size(self) -> int:
        return sum(self.written.values())


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of a checkpoint: its tensors in their order, and their bytes."""

    name: str
    tensors: Names
    size: int


@dataclass(frozen=True, slots=True)
class WeightShare:
    """What the rank `writer` writes.

    It gets the model's tensors of one of the `turns` at a time, and fills one of the `files` after
    the other.
    """

    writer: int
    turns: tuple[Names, ...]
    files: tuple[WeightFile, ...]

    @property
    def names(self) -> Names:
        return tuple(name for turn in self.turns for name in turn)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def weight_shares(
    conversions: Sequence[Conversion],
    ranks_of_stage: Sequence[Sequence[int]],
    *,
    most: int,
    least: int,
    turn: int,
) -> list[WeightShare]:
    """The shares of all writers, in the order of their first tensors.

    Files have at most `most` bytes, and a model that fits into one is rank 0's. Otherwise
    the writers of a stage are as many of its ranks as get `least` bytes each, spread evenly over
    them. A turn has `turn` bytes, or one conversion.

    Example: 16.4 GB on one stage of 8 ranks, with at most 4 GiB and at least 1 GiB, are 8 files of
    2 GB. On 64 ranks they are 15 files, by the ranks 0, 4, 8, 12, 17 and so on.
    """
    if sum(conversion.size for conversion in conversions) <= most:
        by_writer = {0: [*range(len(conversions))]}
    else:
        by_writer = {}
        for stage, ranks in enumerate(ranks_of_stage):
            own = [i for i, conversion in enumerate(conversions) if conversion.stage == stage]
            by_writer |= _balanced(conversions, own, ranks, least)
    in_order = sorted(by_writer.items(), key=lambda item: item[1][0])
    shares = [(writer, [conversions[i] for i in own]) for writer, own in in_order]
    written = [[((x,), n) for c in own for x, n in c.written.items()] for _, own in shares]
    files = [list(_filled(of_writer, most)) for of_writer in written]
    file_names = iter(_file_names(sum(map(len, files))))
    return [
        WeightShare(
            writer,
            tuple(names for names, _ in _filled(((c.names, c.size) for c in own), turn)),
            tuple(WeightFile(next(file_names), tensors, size) for tensors, size in of_writer),
        )
        for (writer, own), of_writer in zip(shares, files, strict=True)
    ]


def _balanced(
    conversions: Sequence[Conversion], own: Sequence[int], ranks: Sequence[int], least: int
) -> dict[int, list[int]]:
    """The numbers of a stage's conversions by writer: the largest first, to who has least."""
    total = sum(conversions[i].size for i in own)
    number = min(len(ranks), max(1, total // least))
    load = {ranks[place * len(ranks) // number]: 0 for place in range(number)}
    by_writer: dict[int, list[int]] = {}
    for i in sorted(own, key=lambda i: (-conversions[i].size, i)):
        writer = min(load, key=lambda rank: (load[rank], rank))
        load[writer] += conversions[i].size
        by_writer.setdefault(writer, []).append(i)
    return {writer: sorted(numbers) for writer, numbers in by_writer.items()}


def _filled(tensors: Iterable[tuple[Names, int]], most: int) -> Iterator[tuple[Names, int]]:
    """Names and bytes of each part, in order: as many of `tensors` as `most` bytes hold."""
    names: Names = ()
    filled = 0
    for more, size in tensors:
        if names and filled + size > most:
            yield names, filled
            names, filled = (), 0
        names += more
        filled += size
    yield names, filled


def _file_names(number: int) -> list[str]:
    """The names that transformers gives the files of a model."""
    if number == 1:
        return ["model.safetensors"]
    return [f"model-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]
