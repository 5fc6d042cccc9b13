"""A server whose samples are vLLM's, against one whose samples are the native engine's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served_command import SdkProgram, Served
from served_loops import ADAM, Client, serving, shifted

from hybridrl.config import Config
from hybridrl.serving.requests import ForwardBackward, OptimStep
from hybridrl.serving.sampling import ClientSampling
from hybridrl.workers.serving import ServingWorker

pytestmark = pytest.mark.vllm

SETTINGS = [
    "cluster=processes", "cluster.ranks=1", "data.max_prompt_tokens=24",
    "model.tiny.head_dim=32",  # vLLM's CPU attention has no smaller ones
]  # fmt: skip
ENGINES = "vllm", "native"
SDK = Path(__file__).parents[2] / ".cache" / "tinker" / "bin" / "python"
PROMPT = [5, 6, 7]
NAMED = np.array([[9, -1], [3, 4]], np.int32)


@pytest.mark.parametrize("rank", [4, 0])
def test_a_loop_has_the_samples_of_the_native_engine(
    make_config: Callable[..., Config],
    tiny_run: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
) -> None:
    """Tokens, gradients and scores of prompts, while samples of two snapshots are parked.

    With adapters, and with all weights.
    """
    draw, park, parked = ClientSampling.draw, ServingWorker._park, list[int]()

    def counted(self: ServingWorker) -> None:
        parked.append(len(self.generator.engine.copy()))
        park(self)

    monkeypatch.setattr(ServingWorker, "_park", counted)
    monkeypatch.setattr(ClientSampling, "draw", lambda self, one, _: draw(self, one, 3))
    tokens, numbers = {}, {}
    settings = [*SETTINGS, f"actor.lora.rank={rank}", "serve.patience_s=0"]
    for engine in ENGINES:
        parked.clear()
        folder = f"run.dir={tmp_path / engine}"
        config = make_config(*tiny_run, *settings, f"rollout={engine}", folder)
        with serving(config) as loop:
            tokens[engine], numbers[engine] = _loop(Client(loop))
        assert sum(parked) >= 4, engine
    assert tokens["vllm"] == tokens["native"]
    np.testing.assert_allclose(numbers["vllm"], numbers["native"], rtol=1e-4, atol=1e-5)


def _loop(client: Client) -> tuple[list[list[int]], list[float]]:
    """Three steps on a client's own samples: tokens, and every number that it is answered with."""
    client.create(seed=3)
    tokens, numbers = list[list[int]](), list[float]()
    for step in range(3):
        path = client.save(str(step))
        wanted: dict[str, Any] = {"max_tokens": 10, "prompt_logprobs": True, "named": NAMED}
        requests = [client.request(snapshot, PROMPT, 2, **wanted) for snapshot in (path, None)]
        warm = (shifted(PROMPT, weights=[0, 0]),)
        turn = ForwardBackward(client.model, warm, "cross_entropy", {}, True)
        answers: list[Any] = client.ask(requests[0], turn, requests[1], turn)
        data = []
        for samples in (answers[0], answers[2]):
            assert np.isnan(samples.prompt_logprobs[0])
            assert samples.named[0, 1] == 0
            numbers += [*samples.prompt_logprobs[1:].tolist(), *samples.named.ravel().tolist()]
            for sample in samples.sequences:
                whole = [*PROMPT, *sample.tokens.tolist()]
                tokens.append(sample.tokens.tolist())
                numbers += sample.logprobs.tolist()
                data.append(shifted(whole, weights=[0, 0] + [1] * len(sample.tokens)))
        own = client.gradient(data, "cross_entropy", backward=False).logprobs
        _check_agreement(own[:2], answers[0])
        _, stepped = client.ask(
            ForwardBackward(client.model, tuple(data), "cross_entropy", {}, True),
            OptimStep(client.model, **ADAM),
        )
        numbers.append(stepped.metrics["grad_norm"])  # type: ignore[union-attr]
    return tokens, numbers


def _check_agreement(own: list[Any], samples: Any) -> None:
    """What was sampled, and the prompt before, are as likely in training."""
    for log_probs, sample in zip(own, samples.sequences, strict=True):
        np.testing.assert_allclose(log_probs[:2], samples.prompt_logprobs[1:], rtol=0, atol=1e-5)
        np.testing.assert_allclose(log_probs[2:], sample.logprobs, rtol=0, atol=1e-5)


@pytest.mark.wide
@pytest.mark.skipif(not SDK.exists(), reason="Tinker's SDK is not in .cache/tinker")
def test_the_sdk_has_the_samples_of_the_native_engine(tmp_path: Path) -> None:
    """Over HTTP, from an environment of its own: sampled, trained, saved, and sampled again."""
    settings = ["model=tiny", *SETTINGS, "cluster.device=cpu", "actor.lora.rank=4", "serve.port=0"]
    ended = {}
    for engine in ENGINES:
        served = Served(tmp_path / engine, *settings, f"rollout={engine}")
        try:
            ended[engine] = SdkProgram("loop", served, SDK).ended()
            code, errors = served.end()
        finally:
            served.kill()
        assert code == 0, errors
    assert ended["vllm"]["tokens"] == ended["native"]["tokens"]
    numbers = [ended[engine]["numbers"] for engine in ENGINES]
    np.testing.assert_allclose(*numbers, rtol=1e-4, atol=1e-5)
