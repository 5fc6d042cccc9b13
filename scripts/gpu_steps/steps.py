"""The table of the report's steps, and the settings that each of them gets."""

import importlib.util
import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Step:
    """`target` is the dotted path of the function that measures, called with settings and figures.

    A step that runs longer than `limit_s` is ended. Without its `package`, or the GPU that it
    needs, it is skipped before anything slow is imported.
    """

    target: str
    limit_s: float
    needs_gpu: bool = False
    package: str = ""

    def obstacle(self, device: str) -> str:
        """Why it cannot run on `device` of this machine; "" if it can."""
        if self.needs_gpu and device == "cpu":
            return "there is no GPU"
        if self.package and importlib.util.find_spec(self.package) is None:
            return f"{self.package} is not installed"
        return ""


STEPS = {
    "tests": Step("gpu_steps.gpu_tests:measure", 150, needs_gpu=True, package="pytest"),
    "bandwidth": Step("gpu_steps.ceilings:bandwidth", 45),
    "flops": Step("gpu_steps.ceilings:flops", 45),
    "attention": Step("gpu_steps.attention:measure", 75),
    "decode": Step("gpu_steps.decode:native", 90),
    "decode_without_graphs": Step("gpu_steps.decode:without_graphs", 90, needs_gpu=True),
    "switch": Step("gpu_steps.switch:measure", 180),
    "train": Step("gpu_steps.training:measure", 90),
    "activations": Step("gpu_steps.activations:measure", 120, needs_gpu=True),
    "offload": Step("gpu_steps.offload:measure", 120, needs_gpu=True),
    "memory": Step("gpu_steps.memory:measure", 120),
    "mismatch": Step("gpu_steps.mismatch:native", 90),
    "decode_vllm": Step("gpu_steps.decode:vllm", 180, package="vllm"),
    "mismatch_vllm": Step("gpu_steps.mismatch:vllm", 180, package="vllm"),
}
"""Every step, in the order of the report: what needs the least comes first."""

DEVICES = ("cpu", "cuda")
MODELS = ("tiny", "1.5b")


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of one call of the report.

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
        """Read what `write` has written."""
        return cls(**json.loads(file.read_text()))
