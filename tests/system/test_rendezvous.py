"""How a rank joins the group of all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.config import ClusterConfig, Device
from hybridrl.system import rendezvous


def test_on_a_gpu_cudnns_attention_is_off_and_queues_are_as_torch_has_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU: what the rank tells torch before it joins, and with which settings."""
    device, joined = torch.device("cuda", 3), {}
    told: list[Any] = []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setattr(rendezvous, "use_interface", lambda host: None)
    monkeypatch.setattr(rendezvous, "own_device", lambda: device)
    monkeypatch.setattr(torch.cuda, "set_device", told.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", told.append)
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **k: joined.update(k, backend=backend)
    )
    config = ClusterConfig(device=Device.cuda, timeout_s=7)
    assert rendezvous.join_group(1, 4, None, "host", config) == device
    assert told == [device, False]
    assert joined["backend"] == "cpu:gloo,cuda:nccl"
    assert joined["timeout"].total_seconds() == 7
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in rendezvous.os.environ
    assert "this rank ignores it" in caplog.text
