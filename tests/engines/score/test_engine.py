"""One process against transformers and the train engine; states; where weights come from."""

import json
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.config import ConfigError, ModelConfig, TrainerConfig
from hybridrl.engines.rollout.interface import Request, SamplingParams
from hybridrl.engines.rollout.kept_ids import KeptIds
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.score.engine import ScoreEngine, Weights
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.packed import PackedBatch, pack
from hybridrl.models.shard import GenParallel

FAMILIES = ["qwen3", "llama", "mistral", "qwen2", "gemma3"]
CPU = torch.device("cpu")
CLOSE = {"rtol": 0, "atol": 1e-5}  # as in tests/engines/train
WAYS: tuple[dict[str, Any], ...] = (
    {}, {"max_tokens_per_micro_batch": 20}, {"deterministic": True},
)  # fmt: skip
Tiny = Callable[..., str]
Oracle = Callable[..., Any]


def make_engine(path: str, load: bool = True, **options: Any) -> ScoreEngine:
    options = {"dtype": torch.float32, "device": CPU, **options}
    engine = ScoreEngine(AutoConfig.from_pretrained(path), GenParallel(), **options)
    if load:
        engine.load(path)
    return engine


def assert_close(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert [value.shape for value in got] == [value.shape for value in wanted]
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_transformers(
    tiny: Tiny, sequences: list[TrainSequence], log_probs_oracle: Oracle, family: str
) -> None:
    wanted = log_probs_oracle(tiny(family), sequences, 0.7)
    for options in (*WAYS, {"fused": True}):
        got = make_engine(tiny(family), temperature=0.7, **options).log_probs(sequences)
        assert_close(got, wanted)
        assert {value.dtype for value in got} == {torch.float32}


@pytest.mark.parametrize("num", [7, 20, None])
def test_the_likeliest_of_a_students_tokens(
    tiny: Tiny, sequences: list[TrainSequence], num: int | None
) -> None:
    """A teacher's head may have more rows, for padding, than its student's."""
    got = make_engine(tiny(), num_likeliest=num).top_log_probs(sequences, 5)
    model = AutoModelForCausalLM.from_pretrained(tiny())
    for sequence, (ids, log_probs) in zip(sequences, got, strict=True):
        count = sequence.response_tokens
        logits = model(sequence.ids[None]).logits[0, -count - 1 : -1] if count else None
        if logits is not None:
            wanted = logits[:, :num].log_softmax(-1).topk(5)
            assert torch.equal(ids, wanted.indices)
            torch.testing.assert_close(log_probs, wanted.values, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_equal_transformers(
    tiny: Tiny, sequences: list[TrainSequence], values_oracle: Oracle, family: str
) -> None:
    """Each at the last token that is not padding; with the response empty, at the prompt's end."""
    path = tiny(family, classifier=True)
    wanted = values_oracle(path, sequences)
    for options in (*WAYS, {"fused": True}):
        got = make_engine(path, classifier=True, **options).values_at_end(sequences)
        assert got == pytest.approx(wanted, abs=1e-5)


def test_its_own_layers_are_fused(tiny: Tiny) -> None:
    """What generates meanwhile keeps its module as it is."""

    def num_fused(engine: ScoreEngine) -> int:
        return sum("forward" in vars(module) for module in engine.model.modules())

    own = make_engine(tiny(), fused=True)
    assert num_fused(own) == 6 * 3 + 1, "four norms, a rotation and a gate a layer, and a norm"
    assert num_fused(make_engine(tiny(), load=False)) == 0
    borrowed = make_engine(tiny(), load=False, fused=True, model=make_engine(tiny()).model)
    assert num_fused(borrowed) == 0


def test_a_row_has_gone_when_the_next_is_packed(
    tiny: Tiny,
    sequences: list[TrainSequence],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the ids that sampling has kept, and with features of images."""
    rows, held = list[weakref.ref[torch.Tensor]](), list[int]()

    def packed(*args: Any, **options: Any) -> PackedBatch:
        held.append(sum(row() is not None for row in rows))
        batch = pack(*args, **options)
        assert batch.kept is not None
        rows.append(weakref.ref(batch.kept))
        return batch

    monkeypatch.setattr("hybridrl.engines.score.engine.pack", packed)
    samples = []
    for sequence in sequences:
        record = KeptIds()
        for _ in range(sequence.response_tokens):
            record.append(np.arange(9, dtype=np.int32))
        samples.append(replace(sequence, kept_ids=torch.from_numpy(record.flat())))
    engine = make_engine(tiny(), max_tokens_per_micro_batch=20)
    engine.log_probs(samples)
    assert len(held) > 2
    assert not any(held)


def by_train_engine(path: str, sequences: list[TrainSequence]) -> Any:
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(max_tokens_per_micro_batch=20),
        device=CPU,
        temperature=0.7,
    )
    return engine.log_probs(sequences)


def test_equals_the_train_engine(
    tiny: Tiny, sequences: list[TrainSequence], ranks: Callable[..., list[Any]]
) -> None:
    (wanted,) = ranks(1, by_train_engine, tiny(), sequences)
    assert_close(make_engine(tiny(), temperature=0.7).log_probs(sequences), wanted)


def test_nothing_to_score(tiny: Tiny) -> None:
    engine = make_engine(tiny())
    assert engine.log_probs([]) == []
    empty = TrainSequence(torch.tensor([4, 5]), 0)
    assert [len(value) for value in engine.log_probs([empty, empty])] == [0, 0]
    classifier = make_engine(tiny(classifier=True), classifier=True)
    assert classifier.values_at_end([]) == []


def test_all_padding_is_scored_where_transformers_does(tiny: Tiny, values_oracle: Oracle) -> None:
    path, padding = tiny(classifier=True), [TrainSequence(torch.zeros(3, dtype=torch.long), 1)]
    got = make_engine(path, classifier=True).values_at_end(padding)
    assert got == pytest.approx(values_oracle(path, padding), abs=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_whatever_rides_along(
    tiny: Tiny, sequences: list[TrainSequence], family: str
) -> None:
    """Bit for bit, alone and in any company. (In one row, most of these differ in a last bit.)"""
    engine = make_engine(tiny(family), deterministic=True)
    together = engine.log_probs(sequences)
    alone = [engine.log_probs([sequence])[0] for sequence in sequences]
    reverse = engine.log_probs(sequences[::-1])[::-1]
    assert all(map(torch.equal, together, alone))
    assert all(map(torch.equal, together, reverse))
    path = tiny(family, classifier=True)
    classifier = make_engine(path, classifier=True, deterministic=True)
    values = classifier.values_at_end(sequences)
    assert values == [classifier.values_at_end([sequence])[0] for sequence in sequences]


def test_bfloat16(tiny: Tiny, sequences: list[TrainSequence], log_probs_oracle: Oracle) -> None:
    got = make_engine(tiny(), dtype=torch.bfloat16).log_probs(sequences)
    wanted = log_probs_oracle(tiny(), sequences, 1.0)
    gap = (torch.cat(got) - torch.cat(wanted)).abs()
    assert got[0].dtype == torch.float32
    assert 1e-4 < gap.mean() < 0.1  # as in tests/engines/rollout


# The rollout engine's own weights


def rollout_of(path: str) -> NativeEngine:
    model = AutoModelForCausalLM.from_pretrained(path)
    engine = NativeEngine(
        model.config, dtype=torch.float32, device=CPU, max_running=8, block_size=4,
        kv_cache_tokens=0, max_sequence=40,
    )  # fmt: skip
    engine.load_weights(model.state_dict().items())
    return engine


def requests_of(temperature: float) -> list[Request]:
    sampling = SamplingParams(10, temperature=temperature)
    return [Request(i, [1 + i, 7, 3][: 1 + i % 3], sampling, stream=i) for i in range(6)]


def generate(engine: NativeEngine, requests: list[Request]) -> dict[Any, Any]:
    engine.submit(requests)
    outputs: dict[Any, Any] = {}
    while engine.stats().running or engine.stats().waiting:
        outputs |= {output.id: output for output in engine.step()}
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_old_policy_equals_what_was_sampled(tiny: Tiny, family: str) -> None:
    """Amid a generation, which goes on as if nothing had been; with new weights too."""
    rollout = rollout_of(tiny(family))
    undisturbed = generate(rollout, requests_of(0.8))
    engine = ScoreEngine(
        rollout.model.config, GenParallel(), model=rollout.model, dtype=torch.float32, device=CPU,
        temperature=0.8,
    )  # fmt: skip
    scored = [
        TrainSequence(torch.tensor([*request.prompt_ids, *undisturbed[request.id].token_ids]), 10)
        for request in requests_of(0.8)
    ]
    assert (engine.weights, engine.weights_bytes) == (Weights.borrowed, 0)

    rollout.submit(requests_of(0.8))
    outputs: dict[Any, Any] = {}
    for step in range(11):
        if step == 4:
            got = engine.log_probs(scored)
        outputs |= {output.id: output for output in rollout.step()}
    assert {id: (o.token_ids, o.log_probs) for id, o in outputs.items()} == {
        id: (o.token_ids, o.log_probs) for id, o in undisturbed.items()
    }
    assert_close(got, [torch.tensor(undisturbed[i].log_probs) for i in range(6)])

    rollout.sleep()
    with pytest.raises(AssertionError, match="sleep"):
        engine.log_probs(scored)
    weights = AutoModelForCausalLM.from_pretrained(tiny(family)).state_dict()
    rollout.load_weights((name, weight * 1.3) for name, weight in weights.items())
    (changed,) = generate(rollout, requests_of(0.8)[:1]).values()
    ids = torch.tensor([1, *changed.token_ids])
    assert_close(engine.log_probs([TrainSequence(ids, 10)]), [torch.tensor(changed.log_probs)])


# Weights and states


def test_states(tiny: Tiny, sequences: list[TrainSequence]) -> None:
    engine = make_engine(tiny(), load=False)
    for too_early in (engine.offload, engine.onload, lambda: engine.log_probs(sequences)):
        with pytest.raises(AssertionError, match="empty"):
            too_early()
    engine.load(tiny())
    wanted, size = engine.log_probs(sequences), engine.weights_bytes
    assert size == sum(p.nbytes for p in engine.model.parameters()) > 0
    with pytest.raises(AssertionError, match="here"):
        engine.onload()
    for _ in range(2):
        engine.offload()
        for wrong in (engine.offload, lambda: engine.log_probs(sequences)):
            with pytest.raises(AssertionError, match="offloaded"):
                wrong()
        assert engine.weights_bytes == size
        engine.onload()
        assert all(map(torch.equal, engine.log_probs(sequences), wanted))


def test_reads_a_checkpoint_in_several_files(tiny: Tiny, sequences: list[TrainSequence]) -> None:
    path = tiny(shard="20KB")
    files = json.loads((Path(path) / "model.safetensors.index.json").read_text())["weight_map"]
    assert len({*files.values()}) > 2
    got = make_engine(path).log_probs(sequences)
    assert all(map(torch.equal, got, make_engine(tiny()).log_probs(sequences)))


def broken(path: str, into: Path, how: str) -> str:
    shutil.copytree(path, into)
    file = into / "model.safetensors"
    weights = load_file(file)
    match how:
        case "missing weight":
            del weights["model.layers.1.mlp.up_proj.weight"]
            save_file(weights, file)
        case "shape":
            weights["model.norm.weight"] = torch.ones(3)
            save_file(weights, file)
        case "damaged":
            file.write_bytes(file.read_bytes()[:50])
        case "no weights":
            file.unlink()
    return str(into)


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("missing weight", "missing: model.layers.1.mlp.up_proj.weight"),
        ("shape", "model.norm.weight"),
        ("damaged", "model.safetensors"),
        ("no weights", "model.safetensors is missing"),
    ],
)
def test_weights_that_cannot_be_read(tiny: Tiny, tmp_path: Path, how: str, named: str) -> None:
    path = broken(tiny(), tmp_path / "broken", how)
    with pytest.raises(ConfigError, match=named) as raised:
        make_engine(path, load=False).load(path, key="reward.model")
    assert raised.value.key == "reward.model"
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"temperature": 0.0}, "temperature"), ({"max_tokens_per_micro_batch": 0}, "max_tokens")],
)
def test_options_that_cannot_work(tiny: Tiny, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make_engine(tiny(), **options)
