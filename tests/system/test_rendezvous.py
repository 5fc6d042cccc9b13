"""How a rank joins the group of all ranks."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybridrl.config import ClusterConfig, Device
from hybridrl.system import rendezvous


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch computes with is as it was, when the test ends."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize(
    ("device", "strict", "computes"),
    [(Device.cuda, True, True), (Device.cuda, False, False), (Device.cpu, True, False)],
)
def test_a_strict_rank_on_a_gpu_is_deterministic_before_it_joins(
    device: Device, strict: bool, computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's groups ask torch as they are made. CPUs compute in one order anyway."""
    states = []

    def join(backend: str, **settings: Any) -> None:
        enabled = torch.are_deterministic_algorithms_enabled()
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        states.append((enabled, warns, rendezvous.os.environ["CUBLAS_WORKSPACE_CONFIG"]))

    monkeypatch.setattr(rendezvous, "use_interface", lambda host: None)
    monkeypatch.setattr(rendezvous, "own_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda enabled: None)
    monkeypatch.setattr(dist, "init_process_group", join)
    rendezvous.join_group(0, 1, None, "host", ClusterConfig(device=device), strict)
    assert states == [(computes, False, ":4096:8" if computes else "")]


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
