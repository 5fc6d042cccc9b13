"""Digests of a rank's samples and weights, and files of its samples' tensors."""

import hashlib
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.folder import write_error
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.flow.sample import SampleId
from hybridrl.telemetry.digests import ShardDigest
from hybridrl.workers.store import SampleStore, StoredSample

_PIECE = 4_000_000  # elements squared at a time, in double precision: 64 MB


def digest(tensor: torch.Tensor) -> ShardDigest:
    """The digest of a tensor's bytes, which come to the host for it."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.detach().cpu().contiguous()
    flat = local.reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    square = None
    if local.is_floating_point():
        square = math.fsum(float(piece.double().square().sum()) for piece in flat.split(_PIECE))
    return ShardDigest(hashlib.blake2b(data, digest_size=8).hexdigest(), square, local.numel())


def digests_of_samples(
    store: SampleStore, ids: Iterable[SampleId]
) -> dict[SampleId, dict[str, ShardDigest]]:
    """A digest of every tensor of the samples, by field."""
    return {id: {name: digest(tensor) for name, tensor in store[id].tensors.items()} for id in ids}


def digests_of_weights(engine: TrainEngine) -> dict[str, ShardDigest]:
    """Digests of this rank's shards of what is trained, by parameter."""
    trained = engine.trained()
    return {name: digest(x) for name, x in engine.named_shards().items() if name in trained}


def save_tensors(file: Path, store: SampleStore, ids: Iterable[SampleId]) -> None:
    """Write all tensors of the samples as `ID/FIELD`; raises OSError for a full disk."""
    tensors: Mapping[str, torch.Tensor] = {
        f"{id}/{name}": tensor.contiguous().clone()
        for id in ids
        for name, tensor in store[id].tensors.items()
    }
    try:
        save_file(dict(tensors), file)
    except SafetensorError as error:
        raise write_error(error, file) from error


def load_tensors(
    folder: Path, store: SampleStore, share: Mapping[SampleId, tuple[int, Any]]
) -> None:
    """Store samples with all tensors that `save_tensors` wrote, by any ranks, to `folder`.

    `share` has the response tokens and the item of each.
    """
    by_text = {str(id): id for id in share}
    tensors: dict[SampleId, dict[str, torch.Tensor]] = {id: {} for id in share}
    for file in sorted(folder.glob("tensors_*.safetensors")):
        with safe_open(file, "pt") as stored:
            for key in stored.keys():  # noqa: SIM118 (it is no mapping)
                text, _, name = key.rpartition("/")
                if text in by_text:
                    tensors[by_text[text]][name] = stored.get_tensor(key)
    for id, (response_tokens, item) in share.items():
        store.add(id, StoredSample(response_tokens, item, tensors[id], item.images))
