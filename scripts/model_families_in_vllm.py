"""Greedy responses of shrunk models by vLLM's CPU build, for `model_families.py`, in a process.

Engines follow one another in the process, which has vLLM imported. After a failure it is a new one.
"""

import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.engines.rollout.vllm.groups import set_environment

HEAD_DIM = 32
"""The narrowest heads that vLLM's CPU attention takes."""


class VLLMProcess:
    """Runs models in vLLM, one after another: a context, which ends the process."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "VLLMProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def problem(self, path: str) -> str | None:
        """Why the responses to a few prompts are not transformers'; None where they are."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _begin)
        try:
            problem = self._pool.submit(_problem, path).result()
        except BrokenProcessPool:
            problem = "the process of vLLM ended"
        if problem is not None:
            self._end()
        return problem

    def _end(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def _begin() -> None:
    """What a rank of a run has: a thread, and a process group."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    rendezvous = Path(tempfile.mkdtemp(), "rendezvous")
    dist.init_process_group("gloo", f"file://{rendezvous}", rank=0, world_size=1)
    set_environment([])  # before the first import
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda inspect: inspect()  # which would import vLLM again


def _problem(path: str) -> str | None:
    from hybridrl.engines import probe
    from hybridrl.engines.rollout.vllm.engine import VOCAB_MULTIPLE, VLLMEngine
    from hybridrl.layout.grouping import TrainAxes
    from hybridrl.layout.layerwise import LayerwiseSwitch
    from hybridrl.layout.switching import plan_switch
    from hybridrl.models.parallel import model_parameters

    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        config = AutoConfig.from_pretrained(path)
        switch = plan_switch(
            model_parameters(config), TrainAxes(), 1, 1,
            vocab_multiple=VOCAB_MULTIPLE, ascending=True,
        )  # fmt: skip
        engine = VLLMEngine(
            path, config, switch.plan.dst, dtype=torch.float32, device=torch.device("cpu"),
            max_running=4, block_size=32, kv_cache_tokens=0, max_sequence=64,
        )  # fmt: skip
        weights = LayerwiseSwitch(switch.plan, 0, torch.float32, torch.device("cpu"))
        weights.switch(dict(model.named_parameters()), engine.load)
        torch.manual_seed(2)
        problem = probe.compare_responses(model, engine)
        engine.close()
    except Exception as error:  # a refusal, or whatever a family's code runs into
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return text.replace(path, "the saved model")[:200]
    return problem
