"""The memory of a trained model on a rank: what stays, and the largest moment of an update.

Training has three moments, by FSDP2's order of work (torch 2.13). When the forward pass ends, all
activations are kept. Then the head or the last layer computes its gradients, or the root group is
gathered again. A layer before the last one computes while the gradients of the layer after it are
reduced. When the backward pass ends, the layers' gradients are reduced, and those of the
root group (embedding and head) are copied for their reduction. In the optimizer's step every
parameter has its gradient.
"""

from dataclasses import dataclass

from hybridrl.config import PipelineSchedule
from hybridrl.costs.zero_bubble import ZeroBubbleUpdate

MASTER = 4
"""Bytes of a trained parameter in float32, and of each of AdamW's two moments."""
EIGHT_BIT_MOMENT = 1 + 4 / 256
"""Bytes of an element of a moment of 8 bits, with a scale for each block of 256."""
CHUNK_KEYS = "keys and values of chunks"
EARLY = "early gradients"
MOMENTS = "moments"


def rows_in_flight(pp: int, schedule: PipelineSchedule, stage: int, rows: int) -> float:
    """Rows whose activations a stage keeps, by the warm-up of the schedules; 0: unknown."""
    chunks = schedule.chunks_per_rank
    if pp == 1:
        return 1
    match schedule:
        case PipelineSchedule.one_f_one_b:
            most: float = pp - stage
        case PipelineSchedule.interleaved:
            most = ((chunks - 1) * pp + 2 * (pp - stage - 1) + 1) / chunks
        case PipelineSchedule.zero_bubble:
            most = pp
    return min(most, rows or most)


def messages_kept(pp: int, schedule: PipelineSchedule, stage: int, in_flight: float) -> int:
    """Hidden states that a stage has received, besides one row: `TrainSizes.received`."""
    chunks = schedule.chunks_per_rank
    on_the_way = 2 if chunks > 1 else (stage > 0) + (stage < pp - 1)
    return round(in_flight * chunks) - 1 + on_the_way


@dataclass(frozen=True, slots=True)
class ActivationSizes:
    """Bytes of a row's activations on a rank, without weights and the module's input.

    `kept` from forward to backward, with the result. `backward` is the most within backward, with
    the gradients of the module's weights.
    """

    kept: int
    backward: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSizes:
    """A trained model on one pipeline stage, on the rank that has most of it. In elements:

    `trained` and `frozen` are the rank's shards. `layer` and `root` are gathered over FSDP: one of
    `layers` layers, and the root group. `trained_layer` and `trained_root` of them get gradients.
    `largest` is the largest parameter on this stage. `read` is what the rank reads of the weights'
    file: whole rows, since pages are larger than a rank's columns.
    """

    trained: int
    frozen: int
    layer: int
    layers: int
    root: int
    trained_layer: int
    trained_root: int
    reduced_layer: int
    """Elements of the layer's gradients once they are reduced: of a rank's shards."""
    largest: int
    read: int
    itemsize: int
    """Bytes of an element in the compute format."""
    fsdp: int
    tp: int
    keep_unsharded: bool
    """Whether weights and gradients stay gathered from the first row of an update to the last."""
    head: int
    """Elements of the vocabulary's head, where it gets a gradient on this stage."""
    several_rows: bool
    """Whether gradients of rows add up."""
    earlier_gradients: bool
    """Whether some are there when most activations are kept."""
    layer_activations: ActivationSizes
    ends: ActivationSizes
    """Activations of embedding, last norm and head, where this stage has them."""
    tied: int = 0
    """Elements of `head` where it is the embedding, too, whose gradient is the sum of two."""
    embedding: int = 0
    """Elements of the embedding, where its gradient is whole on each of the tp ranks."""
    chunk_keys: int = 0
    """Bytes of the keys and values of a sequence in chunks, and of their gradients."""
    in_flight: float = 1
    """Rows whose activations a stage of a pipeline keeps."""
    offloads: bool = False
    """Whether activations of layers are on the host, but for the layer that computes last or next.
    """
    moment: float = MASTER
    """Bytes of an element of each of AdamW's two moments."""
    matrices: int = 0
    """Elements of `trained` that Muon trains, which has one moment of them."""
    owned_matrices: int = 0
    """Elements that Muon makes orthogonal on a rank, whole matrices."""
    largest_matrix: int = 0
    """The largest of them, or of their batches."""
    received: int = 0
    """Bytes that a pipeline has received: inputs of rows in flight, besides one, and what is on its
    way: a row, and a gradient."""
    saved: int = 0
    """Bytes of what a rank gathers at a time for a checkpoint: a parameter, and two buckets."""
    zero_bubble: ZeroBubbleUpdate | None = None
    """The rows of the update, on a stage of such a pipeline."""
    early: bool = False
    """Whether the sharded gradients of earlier calls are there (`schedule.early_backward`)."""

    @property
    def state(self) -> dict[str, int]:
        """What stays between updates."""
        return {
            "float32 weights": MASTER * self.trained,
            "frozen weights": self.itemsize * self.frozen,
            MOMENTS: round(2 * self.moment * self.trained) - MASTER * self.matrices,
        }

    def update(self) -> dict[str, int]:
        """Besides the state, the largest moment of an update."""
        if self.zero_bubble is not None:
            earlier = self._of_earlier_calls()
            moments = [*(x | earlier for x in self.zero_bubble.moments()), self._step()]
        else:
            moments = [
                self._at_head(),
                self._at_root(),
                self._at_last_layer(),
                self._at_layer_before(),
                self._backward_ends(),
                self._step(),
            ]
            if self.keep_unsharded and self.several_rows:
                moments.append(self._row_ends())
        return max(moments, key=lambda sizes: sum(sizes.values()))

    def loading(self, from_actor: bool = False) -> dict[str, int]:
        """Bytes on a GPU while the model is built, of which each rank gets its own boxes.

        A model that begins as the actor gets each of the actor's parameters whole, one after the
        other.
        """
        shards = {"shards": MASTER * self.trained + self.itemsize * self.frozen}
        return shards | ({"whole parameters": MASTER * self.largest} if from_actor else {})

    def saving(self) -> dict[str, int]:
        """Bytes besides the state, while a checkpoint is written."""
        return {"parameter being saved": self.saved}

    def _at_head(self) -> dict[str, int]:
        kept = self._kept_layers(1) * self.layer_activations.kept + self.ends.backward
        return self._forward_ends(self._gathered(0), round(kept))

    def _at_root(self) -> dict[str, int]:
        """Backward gathers the root group again: in one buffer first, then by parameter.

        The shard of it that is trained is converted before.
        """
        kept = round(self._kept_layers(1) * self.layer_activations.kept)
        if self.keep_unsharded or self.fsdp == 1:
            return self._forward_ends(self._gathered(0), kept)
        converted = self.trained_root // self.fsdp
        return self._forward_ends(self.itemsize * (2 * self.root + converted), kept)

    def _at_last_layer(self) -> dict[str, int]:
        layer = self.layer_activations
        kept = (self._kept_layers(2) - 1) * layer.kept + layer.backward
        head = self.itemsize * self.head - self.ends.kept  # the head's own are gone
        return self._forward_ends(self._gathered(2), round(kept) + head)

    def _at_layer_before(self) -> dict[str, int]:
        """Bytes in the layer before the last, while the last layer's gradients are being reduced.

        No pipeline has this moment: it reduces gradients at the end.
        """
        left = self.layers - 1
        if self.keep_unsharded or not left:
            return {}
        layer, gradients = self.layer_activations, MASTER * self.trained_layer
        kept = (min(2, left) if self.offloads else left) - 1
        activations = kept * layer.kept + layer.backward + self.itemsize * self.head
        sizes = self._forward_ends(self._gathered(min(2, left)), activations - self.ends.kept)
        sizes["gradients"] += gradients + MASTER * self.reduced_layer
        return sizes

    def _kept_layers(self, offloading: int) -> float:
        """Layers, of all rows in flight, whose activations are there; so many while they leave."""
        return min(offloading, self.layers) if self.offloads else self.in_flight * self.layers

    def _forward_ends(self, gathered: int, activations: int) -> dict[str, int]:
        return {
            "gathered weights": gathered,
            "activations": activations + self.ends.kept + self.received,
            "gradients": self._earlier_gradients(),
            **self._of_chunks(),
            **self._of_earlier_calls(),
        }

    def _of_chunks(self) -> dict[str, int]:
        """They are freed when the first chunk's backward pass ends, which is the last."""
        return {CHUNK_KEYS: self.chunk_keys} if self.chunk_keys else {}

    def _of_earlier_calls(self) -> dict[str, int]:
        """Sharded, beside those of this call, which are not sharded until its last row."""
        return {EARLY: MASTER * self.trained} if self.early and self.keep_unsharded else {}

    def _gathered(self, layers: int) -> int:
        """In the compute format: all, or the root group and `layers`, one being prefetched."""
        layers = self.layers if self.keep_unsharded else min(layers, self.layers + 1)
        return self.itemsize * (self.root + layers * self.layer)

    def _earlier_gradients(self) -> int:
        """Gradients of the rows before."""
        if not self.earlier_gradients:
            return 0
        return self._sums() if self.keep_unsharded else MASTER * self.trained

    def _sums(self) -> int:
        """Gradients that are not sharded; one that is whole is cut once it is reduced."""
        return MASTER * (self._whole_root + self.layers * self.trained_layer)

    @property
    def _whole_root(self) -> int:
        return self.trained_root + self.embedding - self.embedding // self.tp

    def _row_ends(self) -> dict[str, int]:
        """The first row of several, whose gradients in the compute format become sums."""
        kept = round(max(self.in_flight - 1, 0) * self.layers * self.layer_activations.kept)
        sizes = self._forward_ends(self._gathered(0), 0 if self.offloads else kept)
        return sizes | {"gradients": self._sums() + self.itemsize * self._whole_root}

    def _backward_ends(self) -> dict[str, int]:
        copied, own = MASTER * self.trained_root, self.itemsize * self.trained_root
        previous = MASTER * self.trained_layer
        reduced = MASTER * self.layers * self.reduced_layer
        if self.earlier_gradients and not self.keep_unsharded:
            reduced += copied // self.fsdp  # those of the rows before
        if self.keep_unsharded and self.several_rows:  # sums, which are reduced one by one
            own = copied
        # A vocabulary's gradient under tp is whole before it is cut.
        whole = self.itemsize * self.largest if self.tp > 1 and self.trained_root else 0
        # The gradients of a tied weight as head and as embedding are there beside their sum.
        summed = 2 * self.itemsize * self.tied
        arriving = self.itemsize * self.root + own + previous + max(whole, summed)
        most = max(arriving, own + copied, copied + copied // self.fsdp)
        return {"gradients": reduced + most, **self._of_chunks(), **self._of_earlier_calls()}

    def _step(self) -> dict[str, int]:
        """Muon has whole matrices, orthogonal shards, and four products of the largest matrix."""
        gradients = {"gradients": MASTER * self.trained}
        if not self.matrices:
            return gradients
        elements = self.matrices + self.owned_matrices + 4 * self.largest_matrix
        return gradients | {"whole matrices": self.itemsize * elements}
