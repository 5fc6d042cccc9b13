"""Checkpoints without values: what is written and read is checked for its device, not kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.checkpoint import (
    default_planner,
    filesystem,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from gpu_dry.fake_device import FakeDevice
from hybridrl.checkpoint import hf

_Metadata = state_dict_saver._DistWrapper


@contextmanager
def files_without_values(device: FakeDevice) -> Iterator[None]:
    """Weight files are empty, and reading one fills tensors from host memory.

    Rank 0 writes all of a model, as it does a small one. What a rank writes of a large one is no
    line through two depths: tensors are dealt by size.
    """

    def save_file(tensors: dict[str, torch.Tensor], file: Path, **_: Any) -> None:
        assert {tensor.device.type for tensor in tensors.values()} <= {"cpu"}, file
        file.touch()

    def write_item(
        _: Any, stream: Any, data: torch.Tensor, item: Any, key: str, *__: Any
    ) -> WriteResult:
        assert data.device.type == "cpu", item
        where = filesystem._StorageInfo(key, stream.tell(), stream.write(b"0"))
        return WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=where)

    def read_data(_: Any, plan: Any, planner: Any) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            with device.fake:
                read = torch.empty(tuple(item.lengths), dtype=target.dtype)
            target.copy_(read)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def alone(group: Any, _: bool, rank: int) -> Any:
        return _Metadata(group, False, rank)  # each rank plans for its own shards

    with (
        mock.patch.object(hf, "save_file", save_file),
        mock.patch.object(hf, "MAX_FILE_BYTES", 2**60),
        mock.patch.object(filesystem, "_write_item", write_item),
        mock.patch.object(filesystem.FileSystemReader, "read_data", read_data),
        mock.patch.object(state_dict_saver, "_DistWrapper", alone),
        mock.patch.object(state_dict_loader, "_DistWrapper", alone),
        mock.patch.object(default_planner, "_validate_global_plan", return_value=[]),
    ):
        yield
