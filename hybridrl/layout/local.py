"""The position of boxes in the local tensor of a rank."""

from dataclasses import dataclass

from hybridrl.layout.box import Box


@dataclass(frozen=True, slots=True)
class LocalTensor:
    """A rank's tensor: its `boxes`, concatenated along the dimension in which they differ.

    Example: a tensor-parallel rank of gate and up in one [8, 4] matrix holds rows 0, 1 and 4, 5.
    Its tensor is [4, 4], and row 4 of the matrix is row 2 of it.
    """

    boxes: tuple[Box, ...]

    @property
    def dim(self) -> int:
        """The dimension along which the boxes are concatenated; 0 for one box."""
        ranges = [zip(box.start, box.stop, strict=True) for box in self.boxes]
        differ = [dim for dim, sides in enumerate(zip(*ranges, strict=True)) if len({*sides}) > 1]
        assert len(differ) <= 1, f"boxes that differ in {len(differ)} dimensions: {self.boxes}"
        return differ[0] if differ else 0

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The tensor's shape; None for a rank that holds nothing."""
        if len(self.boxes) < 2:
            return self.boxes[0].shape if self.boxes else None
        shape, dim = list(self.boxes[0].shape), self.dim
        shape[dim] = sum(box.shape[dim] for box in self.boxes)
        return tuple(shape)

    def slices(self, inner: Box) -> tuple[slice, ...]:
        """The index of `inner`, which must be inside one of the boxes, in the tensor."""
        dim, passed = (0 if len(self.boxes) == 1 else self.dim), 0
        for box in self.boxes:
            if box.contains(inner):
                if not passed:
                    return inner.slices(box)
                index = list(inner.slices(box))
                if index:
                    at = index[dim]
                    index[dim] = slice(at.start + passed, at.stop + passed)
                return tuple(index)
            passed += box.shape[dim] if box.shape else 0
        raise AssertionError(f"{inner} is inside none of {self.boxes}")
