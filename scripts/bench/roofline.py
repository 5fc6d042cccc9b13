"""Predicted seconds on H100s by the roofline of the operators that dry runs count.

No GPU is used and nothing is measured: docs/gpu_dry.md says what a dry run is. A line's `value` is
predicted with the shares of a datasheet's figures that plans assume (`costs.layers`), `datasheet`
with all of them, which no kernel reaches. Decode steps are of one GPU, with 1,024 cached tokens a
row. The phases of GRPO are those of Llama 3.1 8B in the setting of NeMo-RL 0.4's performance page:
2,048 samples a step of 1,060 tokens on average and 4,096 at most, trained 512 at a time. It has 16
GPUs and 97.7 s a step. Here all samples have the average length, a quarter of it the prompt: a tail
comes on top, and so do judges.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from gpu_dry import fake_cuda

fake_cuda.load()  # before torch

import warnings  # noqa: E402

from gpu_dry import fake_device  # noqa: E402
from gpu_dry.predicted import (  # noqa: E402
    LLAMA_8B,
    QWEN_1_5B,
    Roofline,
    Setting,
    decode,
    grpo_step,
)
from gpu_dry.roofline import RooflineDevice, Shares  # noqa: E402
from lines import show  # noqa: E402

from hybridrl.costs.devices import ACCELERATORS  # noqa: E402
from hybridrl.costs.layers import FORWARD_SHARE, MEMORY_SHARE  # noqa: E402
from hybridrl.costs.mapping import NETWORK_SHARE  # noqa: E402

GPU = ACCELERATORS["h100"]
ASSUMED, DATASHEET = Shares(FORWARD_SHARE, MEMORY_SHARE, NETWORK_SHARE), Shares()
ROWS = 1, 64, 256
SAMPLES, UPDATES, TOKENS = 2048, 4, 1060
PROMPT, GROUP = TOKENS // 4, 32
NEW = TOKENS - PROMPT


def make(context: int, sequence: int) -> RooflineDevice:
    """A device that fake tensors are on from now on."""
    device = RooflineDevice(context, sequence)
    fake_cuda.install(lambda name: device.sync("wait"))
    fake_device.install(device)
    return device


def show_decode(name: str, shape: dict[str, object], rows: int) -> None:
    """Tokens a second of a batch that decodes."""
    roofline = Roofline(Setting(shape=shape, rows=rows), decode, make)
    own, bound = (roofline.of("decode", GPU, shares) for shares in (ASSUMED, DATASHEET))
    show(
        {
            "name": f"roofline_decode_{name}_{rows}",
            "value": round(rows / own.seconds),
            "unit": "tokens/s",
            "datasheet": round(rows / bound.seconds),
            "step_ms": round(1e3 * own.seconds, 3),
            "host_ms": round(1e3 * own.host_s, 3),
            "emulated": False,
        }
    )


def show_grpo(gpus: int) -> None:
    """Seconds of each phase of a step, and of the step."""
    each = SAMPLES // gpus
    setting = Setting(
        shape=LLAMA_8B,
        ranks=gpus,
        rows=each,
        group=GROUP,
        lengths=(TOKENS,) * (each // UPDATES),
        context=PROMPT + NEW // 2,
        prompt=PROMPT,
        staying=("actor",),
    )
    roofline = Roofline(setting, grpo_step, make)
    times = {"prefill": 1, "decode": NEW, "old policy": UPDATES, "reference": UPDATES}
    times |= {"update": UPDATES, "switch": 1}
    whole = {"value": 0.0, "datasheet": 0.0}
    for phase, number in times.items():
        own, bound = (roofline.of(phase, GPU, shares) for shares in (ASSUMED, DATASHEET))
        figures = {"value": number * own.seconds, "datasheet": number * bound.seconds}
        whole = {key: whole[key] + seconds for key, seconds in figures.items()}
        sent = {"sent_s": round(number * own.sent_s, 3), "host_s": round(number * own.host_s, 3)}
        _show_seconds(f"roofline_grpo_8b_{gpus}_{phase.replace(' ', '_')}", figures | sent)
    _show_seconds(f"roofline_grpo_8b_{gpus}_step", whole)


def _show_seconds(name: str, figures: dict[str, float]) -> None:
    rounded = {key: float(f"{value:.4g}") for key, value in figures.items()}
    show({"name": name, "unit": "s", "emulated": False} | rounded)


def main() -> None:
    """Print every prediction."""
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
    for name, shape in (("1.5b", QWEN_1_5B), ("8b", LLAMA_8B)):
        for rows in ROWS:
            show_decode(name, shape, rows)
    for gpus in (8, 16):
        show_grpo(gpus)


if __name__ == "__main__":
    main()
