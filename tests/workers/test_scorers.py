"""Scoring roles over real processes: each rank gives and keeps the scores of its own samples."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from hybridrl.config import ClusterConfig, Config, DataConfig, Device, ModelConfig, TinyModelConfig
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.flow.graph import ComputeStage
from hybridrl.flow.sample import SampleId
from hybridrl.layout.mesh import Mesh
from hybridrl.models.shard import GenParallel
from hybridrl.models.tiny import make_char_tokenizer, make_tiny_model
from hybridrl.rewards.model import make_reward_model
from hybridrl.workers.scorers import (
    InstanceScorer,
    NeuralReward,
    OldPolicyScorer,
    ReferenceScorer,
    TeachersBySource,
    instance_gather,
)
from hybridrl.workers.store import SampleStore, StoredSample

CPU = torch.device("cpu")
TEMPERATURE = 0.7  # with which the samples were drawn
REFERENCE = ComputeStage(
    name="reference", role="reference", outputs=("reference_log_probs",), temperature=TEMPERATURE
)
OLD_POLICY = ComputeStage(
    name="old", role="actor", outputs=("old_log_probs",), temperature=TEMPERATURE
)
REWARD = ComputeStage(name="reward", role="reward", scalars=("reward", "reward_status"))
TINY = TinyModelConfig(
    hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=64, alphabet="abcdefghij",
)  # fmt: skip
# Whose samples they are: all of the second rank's, none of the first, or some of each.
SHARES: dict[str, list[list[int]]] = {
    "all": [[0, 1, 2, 3, 4, 5]],
    "one has none": [[], [0, 1, 2, 3, 4, 5]],
    "some": [[4, 0], [1], [2, 5], [3]],
}
Ranks = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def paths(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> tuple[str, str]:
    """An actor and a reward model, with weights that tell tokens apart; with experts if asked."""
    root = tmp_path_factory.mktemp("models")
    actor, reward = str(root / "actor"), str(root / "reward")
    experts = getattr(request, "param", 0)
    make_tiny_model(actor, replace(TINY, num_experts=experts, experts_per_token=2), seed=0)
    make_reward_model(reward, actor, seed=1)
    for path, auto in (
        (actor, AutoModelForCausalLM),
        (reward, AutoModelForSequenceClassification),
    ):
        model = auto.from_pretrained(path)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(8 if parameter.dim() > 1 else 1)
        model.save_pretrained(path)
    return actor, reward


def sample(index: int) -> tuple[SampleId, StoredSample]:
    random = torch.Generator().manual_seed(index)
    tokens = torch.randint(3, 13, (4 + 3 * index,), generator=random)
    return SampleId(index), StoredSample(2 * index, None, {"tokens": tokens})


@torch.no_grad()
def expected(paths: tuple[str, str]) -> dict[int, tuple[list[float], float]]:
    """By transformers: log-probabilities at `TEMPERATURE`, and the reward model's score."""
    actor = AutoModelForCausalLM.from_pretrained(paths[0])
    reward = AutoModelForSequenceClassification.from_pretrained(paths[1])
    by_index = {}
    for index in range(6):
        _, stored = sample(index)
        ids, response = stored.tensors["tokens"], stored.response_tokens
        logits = actor(ids[None]).logits[0, len(ids) - response - 1 : -1] / TEMPERATURE
        log_probs = logits.log_softmax(-1).gather(-1, ids[len(ids) - response :, None])[:, 0]
        by_index[index] = log_probs.tolist(), reward(ids[None]).logits.item()
    return by_index


def test_a_teacher_of_a_source_needs_the_samples_item() -> None:
    """Others do not: in another pool a copy of a sample has none."""
    lost = StoredSample(1, None)
    assert InstanceScorer._source(object.__new__(ReferenceScorer), lost) == ""
    teachers = object.__new__(TeachersBySource)
    assert teachers._source(StoredSample(1, SimpleNamespace(source="sums"))) == "sums"
    with pytest.raises(AttributeError, match="source"):
        teachers._source(lost)


def config_of(paths: tuple[str, str]) -> Config:
    config = Config(
        model=ModelConfig(path=paths[0]), data=DataConfig(),
        cluster=ClusterConfig(device=Device.cpu),
    )  # fmt: skip
    config.trainer.max_tokens_per_micro_batch = 30
    return config


def rollout_of(path: str) -> NativeEngine:
    model = AutoModelForCausalLM.from_pretrained(path)
    engine = NativeEngine(
        model.config, dtype=torch.float32, device=CPU, max_running=2, block_size=4,
        kv_cache_tokens=0, max_sequence=20,
    )  # fmt: skip
    engine.load_weights(model.state_dict().items())
    return engine


def score(paths: tuple[str, str], pp: int, tp: int, shares: list[list[int]]) -> dict[str, Any]:
    """All roles on this rank's own samples."""
    order = tuple(reversed(range(pp * tp)))
    parallel = GenParallel.make(Mesh((("instance", 1), ("pp", pp), ("tp", tp)), order), "cpu")
    config, store, result = config_of(paths), SampleStore(), {}
    ids = [SampleId(index) for index in shares[dist.get_rank()]]
    for id in ids:
        store.add(*sample(id.prompt))
    reference = ReferenceScorer(config, paths[0], parallel, CPU, store)
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    reward = NeuralReward(config, paths[1], parallel, CPU, store, tokenizer)
    for role in (reference, reward):
        assert role.weights_bytes > 0
        role.offload()
        role.onload()
    assert reference.compute(REFERENCE, ids) == ({}, ("reference_log_probs",))
    result["scalars"], names = reward.compute(REWARD, ids)
    assert names == ()
    result["log_probs"] = [store[id].tensors["reference_log_probs"].tolist() for id in ids]
    if parallel.tp == parallel.pp == 1:
        old = OldPolicyScorer(config, rollout_of(paths[0]).model, parallel, CPU, store)
        assert old.weights_bytes == 0
        old.offload()  # the weights stay: they are not its own
        old.onload()
        assert old.compute(OLD_POLICY, ids) == ({}, ("old_log_probs",))
        result["old"] = [store[id].tensors["old_log_probs"].tolist() for id in ids]
    return result


@pytest.mark.parametrize(
    ("paths", "pp", "tp", "shares"),
    [(0, 1, 1, "all"), (0, 1, 2, "one has none"), (0, 2, 2, "some"), (4, 1, 2, "one has none")],
    indirect=["paths"],
)
def test_every_rank_keeps_its_own(
    paths: tuple[str, str], ranks: Ranks, pp: int, tp: int, shares: str
) -> None:
    wanted = expected(paths)
    results = ranks(pp * tp, score, paths, pp, tp, SHARES[shares])
    for result, indices in zip(results, SHARES[shares], strict=True):
        for name in result.keys() & {"log_probs", "old"}:
            for scored, index in zip(result[name], indices, strict=True):
                assert scored == pytest.approx(wanted[index][0], abs=1e-5)
        assert result["scalars"]["reward"] == pytest.approx(
            [wanted[i][1] for i in indices], abs=1e-5
        )
        assert result["scalars"]["reward_status"] == ("ok",) * len(indices)
    values = [value for _, value in wanted.values()]
    assert max(values) - min(values) > 0.1, "the reward model says the same of all"


def test_a_score_that_is_no_number_is_marked(paths: tuple[str, str]) -> None:
    store = SampleStore()
    ids = [SampleId(index) for index in range(3)]
    for id in ids:
        store.add(*sample(id.prompt))
    tokenizer = AutoTokenizer.from_pretrained(paths[0])
    reward = NeuralReward(config_of(paths), paths[1], GenParallel(), CPU, store, tokenizer)
    with torch.no_grad():
        reward.engine.model.score.weight.fill_(torch.inf)
    scalars, _ = reward.compute(REWARD, ids)
    assert scalars["reward"] == (0.0,) * 3
    assert all(str(x).startswith("error: the score is ") for x in scalars["reward_status"])


TEMPLATE = (
    "{% for m in messages %}{% if loop.index0 > 3 %}{{ raise_exception('too many') }}{% endif %}"
    "[{{ m.role[0] }}]{{ m.content }}{% endfor %}e"
)


@pytest.mark.parametrize("chat", ["template", "template, plain prompt", "plain"])
def test_another_tokenizer_reads_the_text(
    paths: tuple[str, str], tmp_path: Path, chat: str
) -> None:
    """With its own tokens and chat template, as transformers; one it cannot read has failed."""
    judge = tmp_path / "judge"
    shutil.copytree(paths[1], judge)
    other = make_char_tokenizer("jihgfedcba[]su", TINY.max_positions)
    other.chat_template = TEMPLATE if chat != "plain" else None
    other.save_pretrained(judge)
    model = AutoModelForSequenceClassification.from_pretrained(judge)
    model.resize_token_embeddings(len(other))
    model.save_pretrained(judge)
    actor = AutoTokenizer.from_pretrained(paths[0])
    asked = [{"role": "system", "content": "b"}, {"role": "user", "content": "fad"}]
    store, wanted = SampleStore(), []
    for index, response in enumerate(("hi", "j" * 70, "", "cab")):
        ids = actor("fad" + response)["input_ids"]
        messages = asked if chat == "template" else []
        item = SimpleNamespace(messages=messages * (1 + (index == 3)), prompt="fad")
        tokens = torch.tensor([*ids, actor.eos_token_id])
        store.add(SampleId(index), StoredSample(len(response) + 1, item, {"tokens": tokens}))
        text = {
            "template": f"[s]b[u]fad[a]{response}e",
            "template, plain prompt": f"[u]fad[a]{response}e",
            "plain": f"fad{response}",
        }[chat]
        with torch.no_grad():
            wanted.append(model(torch.tensor([other(text)["input_ids"]])).logits.item())
    reward = NeuralReward(config_of(paths), str(judge), GenParallel(), CPU, store, actor)
    scalars, _ = reward.compute(REWARD, [SampleId(index) for index in range(4)])
    statuses = [str(status) for status in scalars["reward_status"]]
    wrong = {1: "error: "} | ({3: "error: its chat template refuses"} if chat == "template" else {})
    for index in range(4):
        if index in wrong:
            assert statuses[index].startswith(wrong[index]), statuses[index]
        else:
            assert statuses[index] == "ok"
            assert scalars["reward"][index] == pytest.approx(wanted[index], abs=1e-5)
    assert statuses[1].endswith("tokens, and its context is 64")
    assert abs(wanted[0] - wanted[2]) > 1e-3


def gather_places(pp: int, tp: int, order: tuple[int, ...]) -> tuple[int, list[int]]:
    parallel = GenParallel.make(Mesh((("instance", 1), ("pp", pp), ("tp", tp)), order), "cpu")
    return parallel.instance_rank, instance_gather(parallel, parallel.instance_rank)


def test_gathers_by_place_not_by_rank(ranks: Ranks) -> None:
    results = ranks(4, gather_places, 2, 2, (3, 0, 1, 2))
    assert [place for place, _ in results] == [1, 2, 3, 0]
    assert all(gathered == [0, 1, 2, 3] for _, gathered in results)


def test_a_made_reward_model_depends_on_its_seed_alone(
    paths: tuple[str, str], tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        make_reward_model(tmp_path / name, paths[0], seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c
    assert torch.equal(torch.random.get_rng_state(), state)
