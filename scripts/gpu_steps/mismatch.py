"""How far a rollout engine's log-probabilities are from the trainer's, of the same tokens."""

import torch

from gpu_steps.decode import check_vllm
from gpu_steps.figures import Figures
from gpu_steps.ranks import ActorRank, one_rank, run_config
from gpu_steps.sizes import Sizes, sizes_of
from gpu_steps.steps import Settings
from hybridrl.config import Engine
from hybridrl.data import Item
from hybridrl.flow.executor import Sampling, Submit
from hybridrl.flow.graph import ComputeStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.training import score


def native(settings: Settings, figures: Figures) -> None:
    """The native engine."""
    _measure(settings, figures, Engine.native)


def vllm(settings: Settings, figures: Figures) -> None:
    """vLLM, in the version that hybridrl supports."""
    check_vllm()
    _measure(settings, figures, Engine.vllm)


def _measure(settings: Settings, figures: Figures, kind: Engine) -> None:
    """Samples of the engine, scored by the trainer with the weights that made them."""
    sizes = sizes_of(settings)
    with one_rank(settings) as device:
        rank = ActorRank(run_config(settings, engine=kind), device)
        rank.switch()
        ids = generate(rank, sizes, sizes.mismatch_samples)
        rank.residency.release_idle_cache()
        rank.residency.activate(rank.trainer.train_engine)
        stage = ComputeStage(name="trainer", outputs=("trainer",))
        score([rank.trainer.scoring(stage, ids)], None)
        rank.generator.close()
    samples = [rank.store[id].tensors for id in ids]
    gaps = torch.cat([(s["log_probs"] - s["trainer"]).abs() for s in samples])
    about = {"tokens": len(gaps), "dtype": "bfloat16"}
    figures.add("mismatch_mean", gaps.mean().item(), "nats", **about)
    figures.add("mismatch_max", gaps.max().item(), "nats", **about)


def generate(rank: ActorRank, sizes: Sizes, number: int) -> tuple[SampleId, ...]:
    """Samples of random prompts, which are then in the rank's store."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(
        sizes.shape["vocab_size"], (number, sizes.prompt_tokens), generator=generator
    )
    sampling = Sampling(sizes.new_tokens)
    ids = tuple(SampleId(i) for i in range(number))
    commands = [
        Submit((id,), Item("", tuple(prompt), "", (), "", {}), sampling)
        for id, prompt in zip(ids, prompts.tolist(), strict=True)
    ]
    rank.generator.advance(commands, 1)
    while rank.generator.unfinished:
        rank.generator.advance([], sizes.new_tokens)
    return ids
