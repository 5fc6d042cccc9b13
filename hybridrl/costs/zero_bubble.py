"""The memory of an update on a stage of a zero-bubble pipeline (schedule ZB-V).

A stage has two chunks of the model. The backward pass of a chunk has two halves, `I` for its input
and `W` for its weights (Zero Bubble, arXiv 2401.10241). Between them stay its activations, and the
gradients of all products. The model's first chunk has no gradient of its input: there `W` is the
whole backward pass.

    order of stage 0 of 2, 2 rows    F0 F0 F1 I1 W1 F1 I1 W1 (reduce 1) I0 W0 I0 W0 (reduce 0)

`W` leaves gradients in the compute format. The next pass over the chunk adds them to sums in
float32. After the last row they are reduced, and the chunk's gathered weights are freed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FORWARD, INPUT, WEIGHTS = "F", "I", "W"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkSizes:
    """Bytes of a chunk on a stage: activations of a row, weights and gradients."""

    kept: int
    """From forward to the end of backward."""
    between: int
    """Besides these, between the halves."""
    first: int
    """The most in the first half, besides what is kept."""
    second: int
    """The most in the second half, or in a whole backward pass, besides what is there before."""
    gathered: int
    gradients: int
    """Gradients of a row, in the compute format."""
    sums: int
    """Sums of the gradients of all rows, in float32."""
    arriving: int
    """Gradients of the largest group, while they are added to the sums."""
    copied: int
    """The most bytes of the sums that are copied to be reduced."""
    reduced: int
    received: int
    """A row from the stage before; 0 for the model's first chunk."""
    received_gradient: int
    """Its gradient from the stage after; 0 for the model's last chunk."""

    @property
    def in_halves(self) -> bool:
        """Whether its backward pass has two halves."""
        return self.received > 0


@dataclass(slots=True)
class _Progress:
    """Rows that wait for their backward pass, that are between the halves, and that ended.

    `gradients` are the chunk's, in bytes, and `gathered` its weights until they are freed.
    """

    gathered: int
    waiting: int = 0
    between: int = 0
    ended: int = 0
    gradients: int = 0


@dataclass(frozen=True, slots=True)
class ZeroBubbleUpdate:
    """An update of `rows` rows by two `chunks`; `order` has a pass and the index of its chunk."""

    chunks: Sequence[ChunkSizes]
    order: Sequence[tuple[str, int]]
    rows: int

    def moments(self) -> Iterator[dict[str, int]]:
        """Bytes by owner within every pass, and where gradients are added and reduced."""
        progress = [_Progress(chunk.gathered) for chunk in self.chunks]
        for kind, index in self.order:
            chunk, own = self.chunks[index], progress[index]
            if kind == FORWARD:
                own.waiting += 1
            elif kind == INPUT and chunk.in_halves:
                yield self._sizes(progress, chunk.first)
                own.waiting, own.between = own.waiting - 1, own.between + 1
                if own.gradients:
                    own.gradients = chunk.sums
                    yield self._sizes(progress, 0, chunk.arriving)
            elif kind == WEIGHTS:
                yield self._sizes(progress, chunk.second)
                own.ended += 1
                if chunk.in_halves:
                    own.between -= 1
                    own.gradients += chunk.gradients
                    yield self._sizes(progress)
                else:
                    own.waiting -= 1
                    own.gradients = chunk.sums
                    yield self._sizes(progress, 0, chunk.arriving)
                if own.ended == self.rows:  # each group frees its weights, and is reduced
                    own.gathered, own.gradients = 0, chunk.sums
                    yield self._sizes(progress, 0, chunk.copied)
                    own.gradients = chunk.reduced

    def _sizes(
        self, progress: Sequence[_Progress], activations: int = 0, gradients: int = 0
    ) -> dict[str, int]:
        """What the chunks have, and so much more."""
        gathered = 0
        # What this pass has received, and what is on its way for the next one.
        activations += 2 * max(max(c.received, c.received_gradient) for c in self.chunks)
        for chunk, own in zip(self.chunks, progress, strict=True):
            rows = own.waiting + own.between
            activations += rows * chunk.kept + own.between * chunk.between
            # A row that was received counts with what is kept of it. Between the halves both of its
            # gradients are beside it: that of the chunk's result, and that of its input.
            activations += own.between * (chunk.received + chunk.received_gradient)
            gathered += own.gathered
            gradients += own.gradients
        return {"gathered weights": gathered, "activations": activations, "gradients": gradients}
