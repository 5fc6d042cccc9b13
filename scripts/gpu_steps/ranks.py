"""Ranks of a run without a launcher: they join, load a random model, and build the actor."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from gpu_steps.sizes import Sizes, sizes_of
from gpu_steps.steps import Settings
from hybridrl.config import (
    ActivationMode,
    ClusterConfig,
    Config,
    DataConfig,
    Device,
    DType,
    Engine,
    ModelConfig,
    RolloutConfig,
    RolloutLayoutConfig,
    TinyModelConfig,
    TrainerConfig,
)
from hybridrl.models.tiny import make_char_tokenizer
from hybridrl.system.devices import prepare_gpu
from hybridrl.system.rendezvous import join_group, open_store
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.store import SampleStore

_HOST = "127.0.0.1"


@contextmanager
def one_rank(settings: Settings) -> Iterator[torch.device]:
    """This process as the only rank of a run; its device."""
    store = open_store(_HOST, 0, listens=True)
    with _joined(0, 1, store, settings) as device:
        yield device


@contextmanager
def _joined(rank: int, size: int, store: Any, settings: Settings) -> Iterator[torch.device]:
    kind = Device(settings.device)
    device: torch.device = join_group(rank, size, store, _HOST, ClusterConfig(device=kind))
    if kind is Device.cuda:
        prepare_gpu(device, num_threads=0)
    else:
        torch.set_num_threads(1)  # as a run's ranks on CPUs
    try:
        yield device
    finally:
        dist.destroy_process_group()


Measure = Callable[..., list[dict[str, Any]]]


def on_ranks(
    size: int, settings: Settings, measure: Measure, *args: object
) -> list[dict[str, Any]]:
    """The first rank's result of `measure(device, settings, *args)`, called on `size` ranks.

    Each is a separate process, with its own GPU. `measure` is at the top of a module.
    """
    file = Path(settings.folder) / "rank-0.json"
    file.unlink(missing_ok=True)
    store = open_store(_HOST, 0, listens=True)
    spawn(_rank, (size, store.port, settings, str(file), measure, args), nprocs=size)
    result: list[dict[str, Any]] = json.loads(file.read_text())
    return result


def _rank(
    rank: int,
    size: int,
    port: int,
    settings: Settings,
    file: str,
    measure: Measure,
    args: tuple[object, ...],
) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    with _joined(rank, size, open_store(_HOST, port, listens=False), settings) as device:
        result = measure(device, settings, *args)
        if rank == 0:
            Path(file).write_text(json.dumps(result))


def model_directory(settings: Settings) -> str:
    """A directory with random weights of the model in bfloat16, made by the first step that asks.

    The weights are drawn on the device: 1.5 billion numbers take a GPU no time.
    """
    shape = dict(sizes_of(settings).shape)
    digest = hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:8]
    path = Path(settings.scratch) / f"model-{settings.model}-{digest}"
    if path.is_dir():
        return str(path)
    new = path.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(0)
    with torch.device(settings.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(new)
    alphabet = TinyModelConfig().alphabet
    make_char_tokenizer(alphabet, config.max_position_embeddings).save_pretrained(new)
    new.rename(path)
    return str(path)


def run_config(
    settings: Settings, *, engine: Engine = Engine.native, ranks: int = 1, gen_tp: int = 1
) -> Config:
    """The settings of a run in bfloat16 on this machine's device."""
    sizes = sizes_of(settings)
    return Config(
        model=ModelConfig(path=model_directory(settings), compute_dtype=DType.bfloat16),
        data=DataConfig(max_prompt_tokens=sizes.prompt_tokens),
        rollout=RolloutConfig(
            engine=engine,
            max_new_tokens=_longest(sizes) - sizes.prompt_tokens,
            max_running=max(sizes.decode_rows),
            block_size=32,  # vLLM's attention on CPUs wants a multiple of it
            layout=RolloutLayoutConfig(tp=gen_tp),
        ),
        trainer=TrainerConfig(
            max_tokens_per_micro_batch=sizes.row_tokens, activations=ActivationMode.keep
        ),
        cluster=ClusterConfig(ranks=ranks, device=Device(settings.device)),
    )


def _longest(sizes: Sizes) -> int:
    """Tokens of the longest sequence of any step."""
    return max(sizes.sequence_tokens, sizes.prompt_tokens + sizes.new_tokens)


class ActorRank:
    """The actor of a run on this rank."""

    def __init__(self, config: Config, device: torch.device) -> None:
        assert config.model.path is not None
        self.config, self.device, self.store = config, device, SampleStore()
        tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self.actor = ColocatedActor(config, config.model.path, tokenizer, self.store, device)
        self.trainer, self.generator = self.actor.trainer, self.actor.generator
        self.residency = self.actor.residency

    def switch(self) -> None:
        """Enter generation with the weights of training."""
        self.actor.enter_generation()
