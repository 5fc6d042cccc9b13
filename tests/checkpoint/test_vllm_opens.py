"""A checkpoint of a mixture of experts, which a run writes, opens in vLLM and answers alike."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybridrl.checkpoint.hf import save_hf
from hybridrl.config import ModelConfig, TinyModelConfig, TrainerConfig
from hybridrl.config.loss import Loss
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.tiny import make_tiny_model

pytestmark = pytest.mark.vllm


class Likelihood(Loss):
    normalize, fields, needs_entropy = "token", (), False

    def __call__(self, log_probs, entropy, fields):
        return -log_probs, {}


def save_trained(source, target, ids):
    engine = TrainEngine(
        str(source), model=ModelConfig(), trainer=TrainerConfig(), device=torch.device("cpu")
    )
    engine.update([TrainSequence(ids, len(ids) - 1)], Likelihood())
    save_hf(engine, target)


ANSWER = """
import json, sys
from vllm import LLM, SamplingParams

ids = json.loads(sys.argv[2])
engine = LLM(
    sys.argv[1], dtype="float32", skip_tokenizer_init=True, enforce_eager=True, max_model_len=64,
    kv_cache_memory_bytes=2**26, disable_log_stats=True,
)
sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, detokenize=False)
(output,) = engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
choices = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
print("answer", json.dumps([choice[token].logprob for choice, token in choices]))
"""
"""Log-probabilities of a prompt by vLLM, in a process that is no rank."""


def answers(path, ids):
    command = [sys.executable, "-c", ANSWER, str(path), json.dumps(ids.tolist())]
    alone = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    alone.pop("VLLM_PP_LAYER_PARTITION", None)  # of an engine in this process, by an earlier test
    done = subprocess.run(command, capture_output=True, text=True, env=alone, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("answer ")]
    return json.loads(line.removeprefix("answer "))


@torch.no_grad()
def test_vllm_opens_what_a_run_writes(ranks, tmp_path):
    tiny = TinyModelConfig(
        num_experts=4, experts_per_token=2, head_dim=32, moe_intermediate_size=64
    )
    make_tiny_model(tmp_path / "source", tiny, seed=0)
    ids = torch.arange(3, 19)
    ranks(1, save_trained, tmp_path / "source", tmp_path / "saved", ids)
    got = answers(tmp_path / "saved", ids)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
    wanted = log_probs.gather(-1, ids[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(got), wanted, rtol=0, atol=1e-4)
