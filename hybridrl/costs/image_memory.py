"""The memory of prompts' images on a rank: the tower, the features that it keeps, and a pass's."""

from collections.abc import Mapping
from dataclasses import dataclass

TOWER = "image tower"
KEPT_FEATURES = "kept features of images"
ENGINE_FEATURES = "features in the engine"
READING = "images being read"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSizes:
    """Bytes of images on a rank.

    A frozen `tower` has neither gradients nor moments. It counts once for each format in which
    roles of the rank compute, and so do the features that it has `kept` of images seen lately.
    `computing` is the most that it takes for the largest image: pixels, activations, features. The
    others are features in place of embeddings: of a prefill, of a row that a role has `scored`, of
    all rows of an update. vLLM has more of its own in an `engine`, whose weights are here.

    A tower that trains is among the weights, gradients and moments of the models. `kept` are
    generation's features, and on CPUs pixels. `trained` are features and activations of one row, or
    of all that a pipeline has begun.
    """

    tower: int
    kept: int
    computing: int
    prefill: int
    scored: int
    trained: int
    engine: int = 0

    @property
    def features(self) -> tuple[int, int, int]:
        """Features in place of embeddings: of a prefill, a row scored, all rows of an update."""
        return self.prefill, self.scored, self.trained

    @property
    def stays(self) -> Mapping[str, int]:
        """What is on the device in every phase once the first image has come."""
        return {TOWER: self.tower, KEPT_FEATURES: self.kept}

    def reading(self, features: int, activations: int) -> Mapping[str, int]:
        """What a phase takes more than its `activations`, which begin when all images are read."""
        return {READING: features + max(0, self.computing - activations)}

    def beside_cache(self, activations: int) -> int:
        """Bytes that a KV cache leaves to images, where a prefill has so many `activations`."""
        reading = self.reading(self.prefill, activations)
        return self.engine + sum(self.stays.values()) + sum(reading.values())
