"""What a forged `nvidia-smi` prints, and what a process sees of it."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hybridrl.system import node_info, nvidia_smi
from hybridrl.system.nvidia_smi import Gpu, read_gpus

EIGHT = "".join(
    f"{index}, GPU-{index}a6f3c5e-0d1b, NVIDIA H100 80GB HBM3, 81559, {index}, 550.54.15, 9.0\n"
    for index in range(8)
)
SLICED = (
    "0, GPU-5d5ba0d6-d33d, NVIDIA A100-SXM4-40GB, 40960, [N/A], 550.54.15, 8.0\n"
    "1, GPU-7e1c22aa-0b4f, NVIDIA A100-SXM4-40GB, 40960, [N/A], 550.54.15, 8.0\n"
)
SLICES = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d)
  MIG 3g.20gb     Device  0: (UUID: MIG-c6d4f1ef-42e4)
  MIG 1g.5gb      Device  1: (UUID: MIG-cba663e8-9bed)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-7e1c22aa-0b4f)
  MIG 7g.40gb     Device  0: (UUID: MIG-11aa22bb-33cc)
"""
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that"
    " the latest NVIDIA driver is installed and running."
)
MISMATCH = "Failed to initialize NVML: Driver/library version mismatch"
LOST = "Unable to determine the device handle for GPU 0000:65:00.0: Unknown Error"


@pytest.fixture
def forge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put a program `nvidia-smi` first on the path; it answers a query, and `-L`."""

    def write(
        query: str, listing: str = "", code: int = 0, stderr: str = "", body: str = ""
    ) -> None:
        for name, text in {"query": query, "listing": listing, "stderr": stderr}.items():
            (tmp_path / name).write_text(text)
        default = f'case "$1" in -L) cat {tmp_path}/listing ;; *) cat {tmp_path}/query ;; esac\n'
        program = tmp_path / "nvidia-smi"
        end = f"cat {tmp_path}/stderr >&2\nexit {code}\n"
        program.write_text(f"#!/bin/sh\n{body or default}{end}")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return write


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, range(8)),
        ("3", [3]),
        ("5,2", [5, 2]),
        (" 5, 2", [5, 2]),
        ("", []),
        ("-1", []),
        ("1,-1,2", [1]),
        ("1,8,2", [1]),
        ("NoDevFiles", []),
        ("GPU-6a6f3c5e-0d1b,GPU-0a6f3c5e-0d1b", [6, 0]),
        ("GPU-6a", [6]),
        ("GPU-", []),  # the beginning of each: of none in particular
        ("GPU-9a", []),
        ("MIG-c6d4f1ef-42e4", []),
    ],
)
def test_a_process_sees_the_gpus_that_it_names(
    forge: Callable[..., None], visible: str | None, indices: list[int]
) -> None:
    forge(EIGHT)
    gpus, fault = read_gpus(visible)
    assert [gpu.used_bytes >> 20 for gpu in gpus] == list(indices)
    assert fault == ""
    for gpu in gpus:
        assert (gpu.name, gpu.memory_bytes) == ("NVIDIA H100 80GB HBM3", 81559 * 2**20)
        assert (gpu.driver, gpu.capability) == ("550.54.15", "9.0")


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA A100-SXM4-40GB"] * 2),
        ("1", ["NVIDIA A100-SXM4-40GB"]),
        ("MIG-cba663e8-9bed", ["NVIDIA A100-SXM4-40GB MIG 1g.5gb"]),
        ("MIG-11aa22bb-33cc,MIG-c6d4f1ef-42e4", ["NVIDIA A100-SXM4-40GB MIG 7g.40gb"]),
        ("MIG-of-elsewhere", []),
    ],
)
def test_a_process_sees_one_slice(
    forge: Callable[..., None], visible: str | None, names: list[str]
) -> None:
    """The first that it names: CUDA shows it no other."""
    forge(SLICED, SLICES)
    gpus, fault = read_gpus(visible)
    assert [gpu.name for gpu in gpus] == names
    assert fault == ""
    assert all(gpu.used_bytes == 0 for gpu in gpus)
    assert {gpu.memory_bytes for gpu in gpus} <= (
        {0} if "MIG-" in (visible or "") else {40960 << 20}
    )


@pytest.mark.parametrize(
    ("output", "options", "seen", "fault"),
    [
        (f"{NO_DRIVER}\n", {"code": 9}, 0, NO_DRIVER),
        (f"{MISMATCH}\nNVML library version: 550.54\n", {"code": 18}, 0, MISMATCH),
        ("No devices were found\n", {"code": 6}, 0, "No devices were found"),
        ("", {"code": 12, "stderr": "nvidia-smi: libnvidia-ml.so not found\n"}, 0,
         "nvidia-smi: libnvidia-ml.so not found"),
        ("", {"code": 3}, 0, "nvidia-smi ends with exit code 3"),
        (f"{EIGHT}{LOST}\n", {"code": 255}, 8, LOST),
        ("module load cuda first, please, to see GPUs\n", {}, 0,
         "module load cuda first, please, to see GPUs"),
        (f"\n{EIGHT}\n", {}, 8, ""),
        ("", {}, 0, ""),
    ],
)  # fmt: skip
def test_a_program_that_fails_says_why(
    forge: Callable[..., None], output: str, options: dict[str, int], seen: int, fault: str
) -> None:
    """In one line; what it lists nevertheless counts."""
    forge(output, **options)
    gpus, said = read_gpus(None)
    assert (len(gpus), said) == (seen, fault)


def test_a_program_that_hangs_is_left(
    forge: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forge("", body="exec sleep 60\n")
    monkeypatch.setattr(nvidia_smi, "_TIMEOUT_S", 0.2)
    start = time.monotonic()
    assert read_gpus(None) == ((), "nvidia-smi does not answer within 0.2 s")
    assert time.monotonic() - start < 30


def test_a_machine_without_it_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus(None) == ((), "")


def test_a_node_has_the_gpus_of_its_process(
    forge: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    forge(f"{EIGHT}{LOST}\n", code=255)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    info = node_info.read_node_info()
    assert info.gpus == (Gpu("NVIDIA H100 80GB HBM3", 81559 << 20, 7 << 20, "550.54.15", "9.0"),)
    assert info.gpu_fault == LOST
