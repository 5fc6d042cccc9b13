"""Sparse pushes between ranks (`rollout.push=sparse`): deltas through the data plane.

The data plane has every array whole, too, where the training rank is: what no rank gets does not
travel.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.flow.executor import LoadWeights
from hybridrl.layout.layerwise import Held, Load
from hybridrl.layout.push import PushTarget, WeightArray
from hybridrl.layout.push_deltas import KeptArrays, WeightDelta, deltas
from hybridrl.layout.weight_switch import SwitchStats
from hybridrl.workers.data_plane import DataPlane

logger = logging.getLogger(__name__)


class DeltaSource:
    """The deltas of one training rank: from its last push to the present one."""

    def __init__(self, data_plane: DataPlane) -> None:
        self.data_plane = data_plane
        self._before: Mapping[int, WeightArray] = {}

    def deltas(self, references: Mapping[int, Any]) -> dict[int, WeightDelta]:
        """The deltas by place, where an array is not smaller whole.

        `references` are those of the whole arrays, by place. What is in the data plane is also what
        the next deltas begin with: a rank needs no copy besides.
        """
        arrays = self.data_plane.get(list(references.values()))
        after = dict(zip(references, arrays, strict=True))
        changes = deltas(self._before, after)
        self._before = after
        return changes


class DeltaTarget:
    """Takes deltas, or whole arrays, into the tensors of a rollout engine.

    Where a delta does not lead to what was trained, since it is lost, damaged, or begins with other
    weights than the rank has, the rank gets the whole array.
    """

    def __init__(self, target: PushTarget, data_plane: DataPlane) -> None:
        self.target, self.data_plane = target, data_plane
        self.kept = KeptArrays()

    def load(self, command: LoadWeights, load: Load, held: Held | None = None) -> SwitchStats:
        """See `PushTarget.load`. Bytes are those of the deltas and arrays that the rank gets."""
        wholes = dict(zip(self.target.senders, command.arrays, strict=True))
        begun, num_bytes = time.perf_counter(), 0
        arrays = []
        for delta in self.data_plane.get([delta for delta in command.deltas if delta is not None]):
            num_bytes += delta.data.nbytes
            arrays.append(self.kept.apply(delta))

        def whole(sender: int, reason: str = "") -> WeightArray:
            nonlocal num_bytes
            if reason:
                logger.warning("%s; the whole array is taken", reason)
            (array,) = self.data_plane.get([wholes[sender]])
            num_bytes += array.data.nbytes
            return self.kept.keep(array)

        arrays += [
            whole(sender)
            for sender, delta in zip(wholes, command.deltas, strict=True)
            if delta is None
        ]
        came = [array for array in arrays if array is not None]
        stats = self.target.load(came, command.version, load, whole, held)
        seconds = time.perf_counter() - begun - stats.proof_seconds
        return replace(stats, bytes_received=num_bytes, seconds=seconds)
