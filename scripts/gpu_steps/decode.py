"""Tokens a second of a rollout engine, by the number of samples that decode together."""

from collections.abc import Sequence

import torch
from transformers import AutoConfig

from gpu_steps.figures import Figures, Skipped
from gpu_steps.ranks import one_rank, run_config
from gpu_steps.sizes import Sizes, sizes_of
from gpu_steps.steps import Settings
from gpu_steps.timing import seconds
from hybridrl.config import Config, ConfigError, Engine
from hybridrl.engines.rollout.available import check_vllm_installed
from hybridrl.engines.rollout.interface import Request, RolloutEngine, SamplingParams
from hybridrl.engines.rollout.random import stream_key
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.switching import plan_switch
from hybridrl.layout.weight_switch import Tensors
from hybridrl.models.parallel import model_parameters
from hybridrl.models.shard import GenParallel
from hybridrl.workers.generator import make_rollout_engine

_WARM_UP_TOKENS = 4


def native(settings: Settings, figures: Figures) -> None:
    """The native engine, whose steps are CUDA graphs on a GPU."""
    _measure(settings, figures, run_config(settings))


def without_graphs(settings: Settings, figures: Figures) -> None:
    """The native engine, which launches the kernels of a step one by one."""
    config = run_config(settings)
    config.rollout.graph_buckets = []
    _measure(settings, figures, config, "eager_")


def vllm(settings: Settings, figures: Figures) -> None:
    """vLLM, in the version that hybridrl supports."""
    check_vllm()
    _measure(settings, figures, run_config(settings, engine=Engine.vllm))


def check_vllm() -> None:
    """Raise Skipped where another version of vLLM is installed."""
    try:
        check_vllm_installed()
    except ConfigError as error:
        raise Skipped(str(error)) from None


def _measure(settings: Settings, figures: Figures, config: Config, prefix: str = "") -> None:
    sizes = sizes_of(settings)
    with one_rank(settings) as device:
        engine = _engine(config, device)
        blocks = engine.stats().kv_blocks_total
        figures.detail("kv_cache_tokens", blocks * config.rollout.block_size)
        for rows in sizes.decode_rows:
            # Kernels are compiled and graphs are captured in its steps.
            _, first_s, *_ = _rate(engine, rows, sizes, _WARM_UP_TOKENS, device)
            prefill_s, decode_s, steps, tokens = _rate(
                engine, rows, sizes, sizes.new_tokens, device
            )
            about = {"rows": rows, "prompt_tokens": sizes.prompt_tokens}
            prefilled = rows * sizes.prompt_tokens / prefill_s
            figures.add(
                f"{prefix}decode_{rows}", tokens / decode_s, "tokens/s",
                ms_a_step=round(1e3 * decode_s / steps, 3),
                first_steps_s=round(first_s, 3), **about,
            )  # fmt: skip
            figures.add(f"{prefix}prefill_{rows}", prefilled, "tokens/s", **about)
        figures.detail("graph_captures", engine.stats().graph_captures)
        engine.close()


def _engine(config: Config, device: torch.device) -> RolloutEngine:
    """The engine of the config with random weights, awake."""
    assert config.model.path is not None
    model_config = AutoConfig.from_pretrained(config.model.path)
    features = config.rollout.features
    layout = plan_switch(
        model_parameters(model_config), TrainAxes(), 1, 1,
        vocab_multiple=features.vocab_multiple, ascending=features.ascending,
    ).plan.dst  # fmt: skip
    parallel = GenParallel.make(layout.mesh, device.type)
    engine = make_rollout_engine(
        config, config.model.path, model_config, layout, parallel, device, None
    )
    engine.load(_draw)
    return engine


@torch.no_grad()
def _draw(tensors: Tensors, names: Sequence[str] | None = None) -> None:
    """Weights as a new model has them."""
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, 0.02)


def _rate(
    engine: RolloutEngine, rows: int, sizes: Sizes, new: int, device: torch.device
) -> tuple[float, float, int, int]:
    """Seconds until all prompts are cached; seconds, steps and tokens of decoding after that.

    Decoding is counted up to the first response that ends.
    """
    drawn = torch.randint(sizes.shape["vocab_size"], (rows, sizes.prompt_tokens))
    engine.submit(
        [
            Request(i, prompt, SamplingParams(max_new_tokens=new), stream_key(0, i))
            for i, prompt in enumerate(drawn.tolist())
        ]
    )
    wanted = engine.stats().prefill_tokens + rows * (sizes.prompt_tokens - 1)

    def prefill() -> None:
        while engine.stats().prefill_tokens < wanted:
            engine.step()

    def decode() -> None:
        while not engine.step():
            pass

    prefill_s = seconds(prefill, device)
    before = engine.stats()
    decode_s = seconds(decode, device)
    after = engine.stats()
    while engine.stats().running or engine.stats().waiting:
        engine.step()
    return (
        prefill_s,
        decode_s,
        after.decode_steps - before.decode_steps,
        after.decode_tokens - before.decode_tokens,
    )
