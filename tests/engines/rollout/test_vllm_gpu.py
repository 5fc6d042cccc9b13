"""vLLM on a GPU: in-place updates, memory by phase, the first work after sleep."""

import importlib.util
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.random import stream_key
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.layerwise import LayerwiseSwitch
from hybridrl.layout.switching import plan_switch
from hybridrl.models.parallel import model_parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not importlib.util.find_spec("vllm"), reason="make install-vllm"),
]
# A model whose weights and cache are seen among gigabytes.
CONFIG = Qwen3Config(
    vocab_size=32000, hidden_size=1024, intermediate_size=3072, num_hidden_layers=8,
    num_attention_heads=16, num_key_value_heads=8, head_dim=64, max_position_embeddings=2048,
    tie_word_embeddings=True,
)  # fmt: skip
PROMPTS = [list(range(7 + i, 40 + 9 * i)) for i in range(8)]


def _used(device):
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _generate(engine, temperature, new=24):
    engine.submit(
        [
            Request(i, prompt, SamplingParams(new, temperature), stream_key(0, i))
            for i, prompt in enumerate(PROMPTS)
        ]
    )
    outputs = {}
    while len(outputs) < len(PROMPTS):
        outputs |= {output.id: output for output in engine.step()}
    return outputs


def _check(engine, model):
    """Greedy tokens are those of the model, or a near-tie of its."""
    for i, output in _generate(engine, 0.0).items():
        ids = torch.tensor([PROMPTS[i] + output.token_ids], device=model.device)
        log_probs = model(ids).logits[0, len(PROMPTS[i]) - 1 : -1].float().log_softmax(-1)
        drawn = log_probs.gather(-1, ids[0, len(PROMPTS[i]) :, None])[:, 0]
        assert (log_probs.max(-1).values - drawn).max() < 0.05
        torch.testing.assert_close(drawn.cpu(), torch.tensor(output.log_probs), atol=0.1, rtol=0.0)


def _start(folder, **own):
    """An engine on one rank, the model and their switch."""
    from hybridrl.engines.rollout.vllm.engine import VOCAB_MULTIPLE, VLLMEngine

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = f"file://{folder}/store{len(own)}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.bfloat16)
    switch = plan_switch(
        model_parameters(CONFIG), TrainAxes(), 1, 1, vocab_multiple=VOCAB_MULTIPLE, ascending=True
    )
    engine = VLLMEngine(
        f"{folder}/model", CONFIG, switch.plan.dst, dtype=torch.bfloat16, device=device,
        max_running=64, block_size=32, kv_cache_tokens=64 * 2048, max_sequence=2048,
        own_arguments=own,
    )  # fmt: skip
    return engine, model, switch, device


@torch.no_grad()
def _work(_, folder):
    engine, model, switch, device = _start(folder)
    model.to(device)
    weights = sum(p.nbytes for p in model.parameters())
    cache = engine.stats().kv_blocks_total * 32 * engine.stats().kv_bytes_per_token
    addresses = asleep = None
    moves = LayerwiseSwitch(switch.plan, dist.get_rank(), torch.bfloat16, device)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.mul_(1 + 0.2 * torch.rand_like(parameter))
        begun = time.perf_counter()
        stats = moves.switch(dict(model.named_parameters()), engine.load)
        if asleep is not None:
            assert _used(device) - asleep < 1.2 * weights + 2**28, "the cache waits for work"
        print(f"switch {time.perf_counter() - begun:.4f} s, scratch {stats.scratch_bytes}")
        assert not engine._weights.repacks
        _check(engine, model)
        sampled = _generate(engine, 1.0)
        held = {n: t.data_ptr() for n, t in engine._weights.tensors().items()}
        assert addresses in (None, held), "in place"
        addresses = held
        awake = _used(device)
        engine.sleep(keep_weights=True)
        scoring = _used(device)
        assert awake - scoring > 0.9 * cache
        assert {i: o.token_ids for i, o in _generate(engine, 1.0).items()} == {
            i: o.token_ids for i, o in sampled.items()
        }
        engine.sleep()
        asleep = _used(device)
        assert awake - asleep > 0.9 * (cache + weights)
        print(f"awake {awake}, scoring {scoring}, asleep {asleep} bytes")
    engine.close()


def test_updates_sleep_and_wake(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "model"
    )
    spawn(_work, (str(tmp_path),), 1)


@torch.no_grad()
def _draw(_, folder, own):
    """Tokens of samples, of which some are parked; a draw that waits for the device raises."""
    engine, model, switch, device = _start(folder, **own)
    moves = LayerwiseSwitch(switch.plan, dist.get_rank(), torch.bfloat16, device)
    moves.switch(dict(model.to(device).named_parameters()), engine.load)
    assert engine._queue._is_asynchronous is (not own)
    sampler, counts = engine._queue._sampler, [0]
    draw = sampler._draw

    def draw_at_once(logits, rows):
        torch.cuda.set_sync_debug_mode("error")
        try:
            return draw(logits, rows)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            counts[0] += 1

    sampler._draw = draw_at_once
    outputs = _generate(engine, 1.0, new=200)
    assert counts[0] >= 200
    requests = [
        Request(i, prompt, SamplingParams(60), stream_key(1, i)) for i, prompt in enumerate(PROMPTS)
    ]
    engine.submit(requests)
    for _ in range(9):
        engine.step()
    parked = engine.park(range(4))
    assert {len(request.response_ids) for request in parked} == {9}
    engine.submit(parked)
    again = {}
    while len(again) < len(PROMPTS):
        again |= {output.id: output for output in engine.step()}
    tokens = [[of[i].token_ids for i in range(len(PROMPTS))] for of in (outputs, again)]
    assert [len(ids) for ids in tokens[1]] == [60] * len(PROMPTS)
    torch.save(tokens[0], f"{folder}/tokens{len(own)}")
    engine.close()


def test_steps_that_are_scheduled_ahead_draw_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(
        tmp_path / "model"
    )
    for own in ({}, {"async_scheduling": False}):
        spawn(_draw, (str(tmp_path), own), 1)
    assert torch.load(tmp_path / "tokens0") == torch.load(tmp_path / "tokens1")
