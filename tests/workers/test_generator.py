"""A generator without a trainer: its engine, weights from a file, and the samples it makes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from parked_samples import PROMPT, TINY
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config

from hybridrl.checkpoint.sample_records import scan
from hybridrl.config import ClusterConfig, Config, DataConfig, Device, ModelConfig, RolloutConfig
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.flow.executor import Command, Finished, Park, Resume, Sampling, Submit
from hybridrl.flow.sample import SampleId, TokenSpan
from hybridrl.flow.saved_samples import SaveFinished, TakeSaved
from hybridrl.layout.mesh import Mesh
from hybridrl.layout.parameters import gen_layout
from hybridrl.layout.weight_switch import Tensors
from hybridrl.models.local_weights import fill_parameters
from hybridrl.models.parallel import model_parameters
from hybridrl.models.shard import GenParallel
from hybridrl.models.stored_weights import StoredWeights
from hybridrl.models.tiny import make_tiny_model
from hybridrl.system.rendezvous import join_group, open_store
from hybridrl.workers.data_plane import LocalDataPlane, with_parked
from hybridrl.workers.generator import Generator, make_rollout_engine
from hybridrl.workers.sampling import SamplingTexts
from hybridrl.workers.store import SampleStore

CPU = torch.device("cpu")
ALONE = Mesh((("instance", 1), ("pp", 1), ("tp", 1)))
IDS = tuple(SampleId(0, k=k) for k in range(3))
GREEDY = Sampling(24, temperature=0.0)


def test_sequences_end_with_the_models_positions() -> None:
    """Though the longest prompt of the config and its response would have more tokens."""
    model = Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=48,
    )  # fmt: skip
    config = Config(
        model=ModelConfig(path="unused"), data=DataConfig(max_prompt_tokens=32),
        cluster=ClusterConfig(device=Device.cpu),
    )  # fmt: skip
    config.rollout.max_new_tokens, config.rollout.max_running = 40, 1
    layout = gen_layout(model_parameters(model), ALONE, 1)
    engine = make_rollout_engine(config, "unused", model, layout, GenParallel(), CPU, None)
    engine.submit([Request(0, [1] * 8, SamplingParams(40), 0)])
    with pytest.raises(ValueError, match=r"may reach 49 tokens .* the longest sequence is 48"):
        engine.submit([Request(1, [1] * 9, SamplingParams(40), 0)])


@pytest.fixture
def path(tmp_path: Path) -> Iterator[str]:
    """A tiny model's directory; this process is the only rank."""
    make_tiny_model(tmp_path / "model", TINY, seed=0)
    store = open_store("127.0.0.1", 0, listens=True)
    join_group(0, 1, store, "127.0.0.1", ClusterConfig(device=Device.cpu))
    yield str(tmp_path / "model")
    dist.destroy_process_group()


def alone(path: str, store: SampleStore) -> Generator:
    """A generator of the model at `path`, as a rank that only generates would make it."""
    config = Config(
        model=ModelConfig(path=path), data=DataConfig(max_prompt_tokens=8),
        cluster=ClusterConfig(device=Device.cpu), rollout=RolloutConfig(max_new_tokens=24),
    )  # fmt: skip
    model, tokenizer = AutoConfig.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    sampling = SamplingTexts(tokenizer, config.data.chat, config.stop_texts)
    layout = gen_layout(model_parameters(model), ALONE, model.num_hidden_layers)
    return Generator(config, path, model, tokenizer, sampling, store, CPU, layout)


def load_file(generator: Generator, path: str, version: int) -> None:
    """Give the generator the weights of a file."""
    config = AutoConfig.from_pretrained(path)
    layout = gen_layout(model_parameters(config), ALONE, config.num_hidden_layers)
    with StoredWeights(path, config) as weights:

        def fill(tensors: Tensors, names: Sequence[str] | None = None, /) -> None:
            fill_parameters(weights, tensors.items(), layout, 0)

        generator.load(fill, version)


def run(generator: Generator, commands: Sequence[Command]) -> list[Finished]:
    finished = []
    while commands or generator.unfinished:
        ended, *_ = generator.advance(commands, 4)
        finished += ended
        commands = []
    return finished


def greedy(path: str) -> list[int]:
    """What transformers makes of the prompt."""
    model = AutoModelForCausalLM.from_pretrained(path)
    prompt = torch.tensor([PROMPT.prompt_ids])
    tokens = model.generate(prompt, do_sample=False, max_new_tokens=24, eos_token_id=1)
    return tokens[0].tolist()


def test_weights_come_from_a_file_and_samples_are_those_of_transformers(path: str) -> None:
    """They come while it is awake, and wake it; each sample says which version made it."""
    store = SampleStore()
    generator = alone(path, store)
    for version in (3, 4):
        load_file(generator, path, version)
        finished = run(generator, [Submit(IDS, PROMPT, GREEDY)])
        assert {sample.id for sample in finished} == set(IDS)
        for sample in finished:
            assert store[sample.id].tensors["tokens"].tolist() == greedy(path)
            assert sample.spans == (TokenSpan(0, sample.response_tokens, version),)
        store.drop(IDS)
        generator.rollout.sleep()
    generator.close()


def test_parked_samples_go_on_in_another_generator(path: str) -> None:
    """Through the data plane, as between ranks, with newer weights; the versions are told."""
    first, second = (alone(path, SampleStore()) for _ in range(2))
    load_file(first, path, 0)
    load_file(second, path, 1)
    first.advance([Submit(IDS, PROMPT, GREEDY)], 4)
    _, (parked,), *_ = first.advance([Park(IDS)], 0)
    assert set(parked.ids) == set(IDS)
    plane = LocalDataPlane()
    parked = replace(parked, state=first.export_parked(parked, plane))
    resume = with_parked(Resume(IDS, parked), second.instance_rank, plane)
    for sample in run(second, [resume]):
        assert second.store[sample.id].tensors["tokens"].tolist() == greedy(path)
        early, late = sample.spans
        assert (early.version, late.version) == (0, 1)
        assert early.stop == late.start == 4
    assert not first.unfinished


def test_a_sample_is_saved_in_the_step_that_ends_it_and_taken_as_it_was(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call goes on after that, and fails."""
    first, second = (alone(path, SampleStore()) for _ in range(2))
    load_file(first, path, 3)
    load_file(second, path, 3)
    short = Submit(IDS[:2], PROMPT, Sampling(3, temperature=0.0))
    long = Submit((SampleId(1),), PROMPT, GREEDY)
    step, calls = first.engine.step, list[int]()

    def failing() -> list[Output]:
        calls.append(1)
        if len(calls) == 6:
            raise MemoryError
        return step()

    monkeypatch.setattr(first.engine, "step", failing)
    with pytest.raises(MemoryError):
        first.advance([short, long, SaveFinished(str(tmp_path / "saved"), 1)], 16)
    (file,) = (tmp_path / "saved").iterdir()
    records, _ = scan(file)
    places = {SampleId.read(facts["id"]): place for place, facts in records}
    assert sorted(places) == sorted(short.ids)
    # Another process takes one, and makes the others.
    taken = {IDS[0]: places[IDS[0]]}
    decoded = replace(short, ids=IDS[1:2])
    finished, *_ = second.advance([TakeSaved(taken, PROMPT), decoded, long], 24)
    assert [sample.id for sample in finished] == [*IDS[:2], SampleId(1)]
    assert second.engine.stats().decode_tokens == 3 + finished[2].response_tokens
    one, other = (second.store[id].tensors for id in IDS[:2])
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert replace(finished[0], id=IDS[1]) == finished[1]
