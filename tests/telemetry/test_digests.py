"""Records of a step compared: what differs, where first, and by how much."""

import math
from pathlib import Path
from typing import Any

import pytest

from hybridrl.telemetry.digests import (
    ShardDigest,
    StepRecord,
    coarse_steps,
    compare_steps,
    joined,
    read_steps,
)
from hybridrl.telemetry.records import dump

FIELDS = {"tokens": "generate", "log_probs": "generate", "reward": "reward"}


def record(**changes: Any) -> StepRecord:
    samples = {
        id: {"tokens": [f"t{id}", None], "log_probs": [f"l{id}", 2.0], "reward": 0.5}
        for id in ("100.0", "12.0", "12.1")
    }
    for key, value in changes.pop("values", {}).items():
        id, _, name = key.rpartition("/")
        samples[id][name] = value
    whole = {
        "fields": FIELDS,
        "updates": {"actor": "update_actor"},
        "samples": samples,
        "numbers": {"actor": {"loss": 1.0, "grad_norm": 4.0}},
        "weights": {"actor": {"a": ["x", 1.0], "b": ["y", 3.0]}},
    }
    return StepRecord(**(whole | changes))


def differing(other: StepRecord, **options: Any) -> list[tuple[str, str, str, int]]:
    compared = compare_steps(record(), other, **options)
    return [(c.stage, c.name, c.first, c.differing) for c in compared if c.differing]


def test_equal_records() -> None:
    compared = compare_steps(record(), record())
    assert [c.name for c in compared] == [
        "samples", "tokens", "log_probs", "reward", "loss", "grad_norm", "weights",
    ]  # fmt: skip
    assert [c.compared for c in compared] == [3, 3, 3, 3, 1, 1, 2]
    assert all(c.verdict == "equal" and c.within(0.0) for c in compared)


def test_the_first_sample_is_the_first_in_training_order() -> None:
    other = record(values={"100.0/reward": 0.75, "12.1/reward": 0.5 + 1e-9})
    assert differing(other) == [("reward", "reward", "sample 12.1", 2)]
    (comparison,) = [c for c in compare_steps(record(), other) if c.differing]
    assert comparison.most == 0.25
    assert comparison.verdict == (
        "2 of 3 differ by up to 0.25, first sample 12.1: 0.5 and 0.500000001"
    )
    assert comparison.within(0.25)
    assert not comparison.within(0.2)
    assert not comparison.within(0.0)


def test_tensors() -> None:
    """Hashes decide; root mean squares say how far. Tokens are no numbers."""
    other = record(values={"12.0/log_probs": ["other", 2.001], "100.0/tokens": ["other", None]})
    tokens, log_probs = (c for c in compare_steps(record(), other) if c.differing)
    assert (tokens.first, tokens.most) == ("sample 100.0", math.inf)
    assert not tokens.within(1e9)
    assert log_probs.most == pytest.approx(0.001 / 2.001)


def test_relative_to_the_size_above_one() -> None:
    numbers = {"actor": {"loss": 1.0, "grad_norm": 5.0}}
    (comparison,) = [c for c in compare_steps(record(), record(numbers=numbers)) if c.differing]
    assert (comparison.name, comparison.role, comparison.most) == ("grad_norm", "actor", 0.2)


def test_weights_name_the_first_parameter() -> None:
    weights = {"actor": {"a": ["x", 1.0], "b": ["z", 3.0]}}
    assert differing(record(weights=weights)) == [("update_actor", "weights", "b", 1)]


def test_missing_samples() -> None:
    fewer = {id: x for id, x in record().samples.items() if id != "12.0"}
    assert differing(record(samples=fewer)) == [("generate", "samples", "sample 12.0", 1)]
    more = record().samples | {"200.0": {"reward": 1.0}}
    assert differing(record(samples=more)) == [("generate", "samples", "sample 200.0", 1)]
    assert differing(record(samples=more), batch_only=True) == []


def test_a_sample_that_a_filter_left_out() -> None:
    dropped = {"12.1": "filter: has_spread"}
    assert differing(record(dropped=dropped)) == [("filter", "dropped", "sample 12.1", 1)]


def test_what_is_not_finite_is_itself() -> None:
    numbers = {"actor": {"loss": "NaN", "grad_norm": 4.0}}
    assert compare_steps(record(numbers=numbers), record(numbers=numbers))[4].verdict == "equal"
    assert [x[1] for x in differing(record(numbers=numbers))] == ["loss"]
    floats = {"actor": {"loss": math.nan, "grad_norm": 4.0}}  # as metrics are read back
    assert compare_steps(record(numbers=floats), record(numbers=floats))[4].verdict == "equal"


def test_shards_are_joined_in_rank_order() -> None:
    shards = [ShardDigest("aa", 9.0, 3), ShardDigest("bb", 7.0, 1)]
    assert joined(shards[:1]) == ["aa", math.sqrt(3)]
    assert joined(shards)[1] == 2.0
    assert joined(shards)[0] != joined(shards[::-1])[0]
    assert joined([ShardDigest("cc", None, 5)]) == ["cc", None]


def test_records_are_read_back(tmp_path: Path) -> None:
    """The later line of a step counts; without digests, metrics and samples do."""
    from dataclasses import asdict

    lines = [{"step": 1, "phase": "rl", **asdict(record(dropped={"12.0": x}))} for x in "ab"]
    (tmp_path / "digests.jsonl").write_text("".join(dump(line) + "\n" for line in lines))
    assert read_steps(tmp_path) == {1: record(dropped={"12.0": "b"})}
    sample = {"step": 2, "phase": "rl", "id": "7.0", "response": "ab", "tokens": 3, "reward": 1.0}
    others = [sample | {"phase": "evaluation"}, sample | {"id": "7.1", "response": None}]
    (tmp_path / "samples.jsonl").write_text("".join(dump(x) + "\n" for x in (sample, *others)))
    metrics = {"step": 2, "step_s": 1.0, "loss": 0.5, "critic/loss": 0.25}
    (tmp_path / "metrics.jsonl").write_text(f"{dump(metrics)}\n{dump({'step': 9, 'x': 1})}\n")
    coarse = coarse_steps(tmp_path)
    assert coarse.keys() == {2}
    assert {id: x["response"] for id, x in coarse[2].samples.items()} == {"7.0": "ab", "7.1": None}
    assert coarse[2].numbers == {"actor": {"loss": 0.5}, "critic": {"loss": 0.25}}
    assert not coarse[2].exact


def test_of_a_sample_whose_texts_are_lost_the_rest_is_compared(tmp_path: Path) -> None:
    """A later record of it is the one that counts."""
    sample = {"step": 1, "id": "7.0", "response": "ab", "tokens": 3, "reward": 1.0}
    lost = [sample, sample | {"response": None, "tokens": 4, "reward": 0.5}]
    (tmp_path / "lost").mkdir()
    for folder, samples in ((tmp_path, [sample]), (tmp_path / "lost", lost)):
        (folder / "samples.jsonl").write_text("".join(dump(x) + "\n" for x in samples))
        (folder / "metrics.jsonl").touch()
    one, other = (coarse_steps(folder)[1] for folder in (tmp_path, tmp_path / "lost"))
    for pair in ((one, other), (other, one)):
        compared = compare_steps(*pair)
        assert [(c.name, c.differing) for c in compared] == [("tokens", 1), ("reward", 1)]
