"""One rank's actor on a CPU and on a GPU: the same tests, of numbers that a dry run has not."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl.algorithms.losses import ReinforceLoss
from hybridrl.config import (
    ActivationMode,
    ClusterConfig,
    Config,
    DataConfig,
    Deterministic,
    Device,
    DType,
    ModelConfig,
    RolloutConfig,
    TinyModelConfig,
    TrainerConfig,
)
from hybridrl.data import Item
from hybridrl.engines.train import state_memory
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.flow.executor import Park, Resume, Sampling, Submit
from hybridrl.flow.sample import SampleId
from hybridrl.models.tiny import make_tiny_model
from hybridrl.system.devices import prepare_gpu
from hybridrl.system.rendezvous import join_group, open_store
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.store import SampleStore

HOST = "127.0.0.1"
CLOSE = 1e-4
"""Nats, of a tiny model in float32; kernels add in another order."""


MOVES = "cpu, whose state moves"
"""What leaves the device goes to other memory of the same host, by the same copies."""


@pytest.fixture(scope="module", params=["cpu", MOVES, pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of this process, the only rank of a run."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    store = open_store(HOST, 0, listens=True)
    kind = Device.cuda if request.param == "cuda" else Device.cpu
    own = join_group(0, 1, store, HOST, ClusterConfig(device=kind), strict=True)
    if request.param == "cuda":
        prepare_gpu(own, num_threads=0)
    with pytest.MonkeyPatch.context() as patch:
        if request.param == MOVES:
            patch.setattr(state_memory, "leaves_device", lambda device: True)
        yield own
    torch.use_deterministic_algorithms(False)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tiny = TinyModelConfig(
        hidden_size=64, intermediate_size=96, num_layers=3, num_heads=4, num_kv_heads=2,
        head_dim=16, max_positions=64, alphabet="abcdefghij",
    )  # fmt: skip
    make_tiny_model(path, tiny, seed=0)
    return str(path)


@dataclass(frozen=True, slots=True)
class Rank:
    """The actor of a strict run, whose samples decode alone."""

    actor: ColocatedActor
    store: SampleStore

    def generate(self, number: int, parked_at: int = 0) -> list[TrainSequence]:
        """Samples of one prompt; with `parked_at` they are parked after so many tokens."""
        generator, residency = self.actor.generator, self.actor.residency
        self.actor.enter_generation()
        ids = tuple(SampleId(i) for i in range(number))
        prompt = (3, 4, 5, 6)
        submit = Submit(ids, Item("", prompt, "", (), "", {}), Sampling(16))
        if parked_at:
            generator.advance([submit], parked_at)
            _, (parked,), *_ = generator.advance([Park(ids, with_kv=True)], 0)
            assert parked.ids, "all samples have ended before"
            generator.advance([Resume(parked.ids, parked)], 1)
        else:
            generator.advance([submit], 1)
        while generator.unfinished:
            generator.advance([], 16)
        samples = [self.store[id] for id in ids]
        self.store.drop(ids)
        residency.enter_training()
        residency.activate(self.actor.trainer.train_engine)
        return [
            TrainSequence(s.tensors["tokens"], s.response_tokens, {**s.tensors, "advantages": 1.0})
            for s in samples
        ]


def settings(model: str, device: torch.device, mode: ActivationMode) -> Config:
    return Config(
        model=ModelConfig(path=model, compute_dtype=DType.float32),
        data=DataConfig(max_prompt_tokens=16),
        rollout=RolloutConfig(max_new_tokens=32, max_running=4, dtype=DType.float32),
        trainer=TrainerConfig(max_tokens_per_micro_batch=48, activations=mode),
        cluster=ClusterConfig(ranks=1, device=Device(device.type)),
        deterministic=Deterministic.strict,
    )


@pytest.fixture
def rank(device: torch.device, model: str) -> Iterator[Rank]:
    store, tokenizer = SampleStore(), AutoTokenizer.from_pretrained(model)
    config = settings(model, device, ActivationMode.keep)
    actor = ColocatedActor(config, model, tokenizer, store, device)
    yield Rank(actor, store)
    actor.generator.close()


def engine_of(model: str, device: torch.device, mode: ActivationMode) -> TrainEngine:
    config = settings(model, device, mode)
    return TrainEngine(model, model=config.model, trainer=config.trainer, device=device)


def rows() -> list[TrainSequence]:
    ids = torch.randint(3, 13, (6, 20), generator=torch.Generator().manual_seed(0))
    return [TrainSequence(row, 12, {"advantages": (-1.0) ** i}) for i, row in enumerate(ids)]


def state(engine: TrainEngine) -> list[torch.Tensor]:
    """Master weights and moments."""
    moments = [v for values in engine.optimizer.state.values() for v in values.values()]
    tensors = [x for x in (*engine.trained_parameters(), *moments) if isinstance(x, torch.Tensor)]
    return [(x.to_local() if isinstance(x, DTensor) else x).detach() for x in tensors if x.ndim]


def test_scores_are_those_of_transformers(device: torch.device, model: str) -> None:
    scored = engine_of(model, device, ActivationMode.keep).log_probs(rows())
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for row, log_probs in zip(rows(), scored, strict=True):
        logits = reference(row.ids[None]).logits[0, -row.response_tokens - 1 : -1]
        wanted = logits.log_softmax(-1).gather(1, row.ids[-row.response_tokens :, None])[:, 0]
        assert (log_probs - wanted).abs().max() < CLOSE


def test_the_engines_agree_before_and_after_an_update(rank: Rank) -> None:
    engine = rank.actor.trainer.train_engine
    for _ in range(2):
        sequences = rank.generate(3)
        for sequence, log_probs in zip(sequences, engine.log_probs(sequences), strict=True):
            assert (sequence.fields["log_probs"] - log_probs).abs().max() < CLOSE
        before = [tensor.clone() for tensor in state(engine)]
        engine.update(sequences, ReinforceLoss())
        assert any(not torch.equal(a, b) for a, b in zip(before, state(engine), strict=False))


def test_what_is_offloaded_comes_back_bit_for_bit(device: torch.device, model: str) -> None:
    engine = engine_of(model, device, ActivationMode.keep)
    engine.update(rows(), ReinforceLoss())
    before = [tensor.cpu().clone() for tensor in state(engine)]
    blocks = list(engine.memory._all())
    assert len(blocks) == 2, "weights and moments"
    engine.offload()
    moves = state_memory.leaves_device(device)
    assert [block.on_host for block in blocks] == [moves] * 2
    assert {tensor.device.type for tensor in state(engine)} == {"cpu"}
    storages = {tensor.untyped_storage().data_ptr() for tensor in state(engine)}
    assert len(storages) == 2, "each in one storage"
    engine.onload()
    assert not any(block.on_host for block in blocks)
    after = state(engine)
    assert {tensor.device.type for tensor in after} == {device.type}
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, after, strict=True))


def test_strict_samples_are_equal_if_they_are_parked_with_their_cache(rank: Rank) -> None:
    whole, resumed = rank.generate(3), rank.generate(3, parked_at=5)
    for one, other in zip(whole, resumed, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.fields["log_probs"], other.fields["log_probs"])


def test_activations_change_no_update(device: torch.device, model: str) -> None:
    """Kept, recomputed in part or all, or in host memory meanwhile."""
    kept: list[torch.Tensor] = []
    for mode in (m for m in ActivationMode if m is not ActivationMode.auto):
        engine = engine_of(model, device, mode)
        engine.update(rows(), ReinforceLoss())
        updated = [tensor.cpu() for tensor in state(engine)]
        kept = kept or updated
        assert all(torch.equal(a, b) for a, b in zip(kept, updated, strict=True)), mode


def test_a_checkpoint_of_the_model_is_read_by_transformers(
    rank: Rank, model: str, tmp_path: Path
) -> None:
    from hybridrl.checkpoint.hf import save_hf

    engine = rank.actor.trainer.train_engine
    engine.update(rows(), ReinforceLoss())
    save_hf(engine, tmp_path, AutoTokenizer.from_pretrained(model), DType.float32)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    (first, *_), (log_probs, *_) = rows(), engine.log_probs(rows())
    logits = saved(first.ids[None]).logits[0, -first.response_tokens - 1 : -1]
    wanted = logits.log_softmax(-1).gather(1, first.ids[-first.response_tokens :, None])[:, 0]
    assert (log_probs - wanted).abs().max() < CLOSE
