"""The table of the report's steps, and the settings that each of them gets."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """`target` is the dotted path of the function that measures, called with settings and figures.

    A step that runs longer than `limit_s` is ended.
    """

    target: str
    limit_s: float


STEPS = {
    "tests": Step("gpu_steps.gpu_tests:measure", 150),
    "bandwidth": Step("gpu_steps.ceilings:bandwidth", 45),
    "flops": Step("gpu_steps.ceilings:flops", 45),
    "attention": Step("gpu_steps.attention:measure", 75),
    "decode": Step("gpu_steps.decode:native", 90),
    "switch": Step("gpu_steps.switch:measure", 180),
    "train": Step("gpu_steps.training:measure", 90),
    "offload": Step("gpu_steps.offload:measure", 120),
    "memory": Step("gpu_steps.memory:measure", 120),
    "mismatch": Step("gpu_steps.mismatch:native", 90),
    "decode_vllm": Step("gpu_steps.decode:vllm", 180),
    "mismatch_vllm": Step("gpu_steps.mismatch:vllm", 180),
}
"""Every step, in the order of the report: what needs the least comes first."""

DEVICES = ("cpu", "cuda")
MODELS = ("tiny", "1.5b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of one call of the report.

    `gpus` are those of this machine, `gpu_memory` the bytes of the smallest, 0 without one.
    `folder` is for a step's files, `scratch` for the model, which all steps and calls share.
    """

    device: str
    model: str
    gpus: int
    gpu_memory: int
    folder: str
    scratch: str

    def write(self, file: Path) -> None:
        """Hand them to a step's process."""
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> "Settings":
        """Those of `write`."""
        return cls(**json.loads(file.read_text()))
