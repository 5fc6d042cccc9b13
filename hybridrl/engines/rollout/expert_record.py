"""The experts that the tokens of a sequence took in generation, kept for router replay.

A sequence is computed in several passes: a shared prompt, a prefill, decode steps, and a prefill
again after it was preempted or parked. What a pass computes for the first time it records. What was
recorded before it replays, so that a recomputed token is what it was.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from hybridrl.models.router_replay import NO_RECORD, ExpertShape, Routing
from hybridrl.models.shard import GenParallel

Experts = npt.NDArray[np.integer]
"""Experts [tokens, layers, k], of all layers of the model that have any."""


class ExpertRecord:
    """The experts of a sequence's first tokens, in pieces as they were computed."""

    def __init__(self, pieces: Iterable[Experts] = ()) -> None:
        self._pieces = list(pieces)
        self._tokens = sum(map(len, self._pieces))

    def __len__(self) -> int:
        """The number of tokens."""
        return self._tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the record: tokens * layers * k, or twice that beyond 256 experts."""
        return sum(piece.nbytes for piece in self._pieces)

    def append(self, experts: Experts) -> None:
        """The next tokens were computed."""
        self._pieces.append(experts)
        self._tokens += len(experts)

    def whole(self) -> Experts:
        """All of it as one array, which must not be written to."""
        if len(self._pieces) != 1:
            self._pieces = [np.concatenate(self._pieces)] if self._pieces else []
        return self._pieces[0]

    def rows(self, start: int, stop: int) -> Experts:
        """Tokens `start` to `stop`, which were computed."""
        return self.whole()[start:stop]

    def replace(self, experts: Experts) -> None:
        """Other layers of the same tokens are known now."""
        assert len(experts) == self._tokens, "a record of another length"
        self._pieces = [experts]

    def copy(self) -> "ExpertRecord":
        """A record that may grow by itself."""
        return ExpertRecord(self._pieces)


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """Consecutive tokens of a sequence in a pass: `tokens` of them, from its row `row` on.

    They are the sequence's tokens from `start` on, and `record` is the sequence's.
    """

    record: ExpertRecord
    start: int
    tokens: int
    row: int

    @property
    def known(self) -> int:
        """The number of its tokens, the first ones, whose experts were recorded before."""
        return max(0, min(len(self.record) - self.start, self.tokens))


class ExpertRecorder:
    """Records and replays the experts of the passes of one rank of an instance.

    Under pipeline parallelism a rank sees its own layers alone; `join` adds those of the others.
    """

    def __init__(
        self,
        shape: ExpertShape,
        own_layers: Container[int],
        parallel: GenParallel,
        device: torch.device,
    ) -> None:
        """`own_layers` are the numbers of this rank's decoder layers."""
        self._shape, self._parallel, self._device = shape, parallel, device
        self._own = [i for i, layer in enumerate(shape.layers) if layer in own_layers]

    def routing(self, spans: Sequence[SequenceRows], rows: int) -> Routing:
        """The experts of a pass of `rows` tokens: recorded ones, and the routers' own choice."""
        if not any(span.known for span in spans):
            return Routing(records=True)
        forced = torch.full(self._size(rows), NO_RECORD, dtype=torch.int16)
        for span in (span for span in spans if span.known):
            known = span.record.rows(span.start, span.start + span.known).astype(np.int16)
            forced[span.row : span.row + span.known] = torch.from_numpy(known)
        return Routing(forced.to(self._device), records=True)

    def keep(self, spans: Sequence[SequenceRows], routing: Routing) -> None:
        """Append to the records what a pass has computed for the first time."""
        if all(span.known == span.tokens for span in spans):
            return
        experts = self.experts(routing, max(span.row + span.tokens for span in spans))
        for span in spans:
            assert len(span.record) >= span.start, "a token before it has not been computed"
            new = experts[span.row + span.known : span.row + span.tokens]
            if len(new):
                span.record.append(new)

    def experts(self, routing: Routing, rows: int) -> Experts:
        """What a pass has computed for its first `rows` tokens: [rows, layers, k]."""
        # the experts of all its layers leave the device at once
        return self.whole(routing.recorded()[:rows].cpu() if self._own else None, rows)

    def _size(self, rows: int) -> tuple[int, int, int]:
        return rows, len(self._shape.layers), self._shape.per_token

    def whole(self, own: torch.Tensor | None, rows: int) -> Experts:
        """Experts of a pass's first `rows` tokens, from those of this rank's layers on the host.

        The layers of other stages have zeros.
        """
        whole = np.zeros(self._size(rows), self._shape.numpy_dtype)
        if own is not None:
            whole[:, self._own] = own[:rows].numpy()
        return whole

    def join(self, records: Sequence[ExpertRecord]) -> None:
        """Add the layers of the other stages; all ranks of the instance call it together."""
        records = [record for record in records if len(record)]
        if self._parallel.pp == 1 or not records:
            return
        arrays = []
        for record in records:
            array = np.zeros_like(record.whole())
            array[:, self._own] = record.whole()[:, self._own]
            arrays.append(array)
        joined = np.concatenate(arrays)
        message = torch.from_numpy(joined.view(np.uint8).reshape(-1))
        dist.all_reduce(message, group=self._parallel.pp_group)  # a layer is on one stage alone
        ends = np.cumsum([len(array) for array in arrays])[:-1]
        for record, array in zip(records, np.split(joined, ends), strict=True):
            record.replace(array)
