"""On real ranks, a response that several versions made has each version's log-probabilities."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hybridrl.flow.sample import Sample
from hybridrl.telemetry.records import read_lines

STEPS, WANTED, GROUP = 5, 4, 4
PARTIAL = [
    "schedule=partial", "schedule.over_provision=2", "schedule.max_staleness=2",
    f"trainer.steps={STEPS}", "trainer.save_every=1", f"trainer.keep_last={STEPS}",
    "telemetry.report=true", "cluster.ranks=2",
]  # fmt: skip


def start(train: Callable[..., Any], long_tail: list[str], folder: Path, *more: str) -> Any:
    ours = tuple(setting.partition("=")[0] for setting in PARTIAL)
    kept = [setting for setting in long_tail if not setting.startswith(ours)]
    return train(folder / "run", *kept, *PARTIAL, *more)


@pytest.mark.long
@pytest.mark.parametrize(
    "layout",
    [
        [],
        pytest.param(["cluster.ranks=4", "rollout.layout.tp=2"], marks=pytest.mark.slow),
        pytest.param(["rollout=vllm", "model.tiny.head_dim=32"], marks=pytest.mark.vllm),
    ],
)
def test_every_token_has_the_log_probability_of_the_version_that_made_it(
    train_here: Callable[..., Any],
    long_tail: list[str],
    tmp_path: Path,
    layout: list[str],
) -> None:
    run = start(train_here, long_tail, tmp_path, *layout)
    check_record(run)
    check_log_probs(run, keep=False)


@pytest.mark.slow
def test_kept_keys_and_values_are_those_of_older_weights(
    train_here: Callable[..., Any], long_tail: list[str], tmp_path: Path
) -> None:
    run = start(train_here, long_tail, tmp_path, "schedule.parked_kv=keep")
    check_record(run)
    check_log_probs(run, keep=True)


def check_record(run: Any) -> None:
    """Whole groups once each, none too old; shares as the spans say; nothing left behind."""
    trained = [sample for step in run.steps for sample in step.samples]
    assert len({s.id for s in trained}) == len(trained) == STEPS * WANTED * GROUP
    resumed = 0.0
    for number, (step, line) in enumerate(zip(run.steps, run.metrics, strict=True)):
        assert [s.id for s in step.samples] == sorted(s.id for s in step.samples)
        assert len({s.id.prompt for s in step.samples}) == WANTED
        tokens_by_version: dict[int, int] = {}
        for sample in step.samples:
            bounds = [0, *(span.stop for span in sample.spans)]
            assert [span.start for span in sample.spans] == bounds[:-1]
            assert bounds[-1] == sample.response_tokens
            for span in sample.spans:
                tokens_by_version[span.version] = (
                    tokens_by_version.get(span.version, 0) + span.stop - span.start
                )
        assert min(tokens_by_version) >= number - 2
        assert max(tokens_by_version) == number  # weights of as many updates
        old = sum(tokens for version, tokens in tokens_by_version.items() if version < number)
        assert line["samples/off_policy_share"] == pytest.approx(
            old / sum(tokens_by_version.values())
        )
        assert line["samples/staleness"] <= 2
        resumed += line["samples/resumed"]
    assert resumed > 0
    assert max(line["samples/off_policy_share"] for line in run.metrics) > 0
    events = read_lines(run.dir / "events.jsonl")
    (left,) = [event["samples"] for event in events if event["kind"] == "unfinished"]
    assert left == WANTED * GROUP  # over-provision 2
    assert run.stored == [0] * len(run.stored)
    assert "<html" in (run.dir / "report.html").read_text()


def check_log_probs(run: Any, keep: bool) -> None:
    """Against transformers in float64, every sample; some have spans of several versions."""
    folders = ["start", *(f"checkpoints/step_{step:06d}" for step in range(1, STEPS))]
    models = [AutoModelForCausalLM.from_pretrained(run.dir / f).double().eval() for f in folders]
    several, kept_matters = 0, 0.0
    for sample in (sample for step in run.steps for sample in step.samples):
        tokens, log_probs, _ = json.loads(sample.scalars["told"])
        recorded = torch.tensor(log_probs, dtype=torch.float64)
        wanted = by_version(models, sample, tokens, keep)
        # Measured: 2e-6, of order 4; as in the engine's own tests.
        torch.testing.assert_close(recorded, wanted, atol=1e-5, rtol=0)
        if len(sample.spans) > 1:
            several += 1
            other = by_version(models, sample, tokens, not keep)
            kept_matters = max(kept_matters, float((wanted - other).abs().max()))
    assert several >= 5
    assert kept_matters > 1e-3  # so the two cannot be mistaken


@torch.no_grad()
def by_version(
    models: list[PreTrainedModel], sample: Sample, tokens: list[int], keep: bool
) -> torch.Tensor:
    """Log-probabilities [response_tokens]; with `keep`, over keys and values as they were made.

    A token's keys and values are made where the next token is drawn.
    """
    drawn_log_probs, cache = [], DynamicCache()
    for span in sample.spans:
        model = models[span.version]
        begin, end = (sample.prompt_tokens + i - 1 for i in (span.start, span.stop))
        cache = cache if keep else DynamicCache()
        seen = cache.get_seq_length()
        assert not keep or seen == (begin if span.start else 0)
        ids = torch.tensor([tokens[seen:end]])
        scores = model(ids, past_key_values=cache).logits[0].log_softmax(-1)[begin - seen :]
        drawn = torch.tensor(tokens[begin + 1 : end + 1])
        drawn_log_probs.append(scores.gather(1, drawn[:, None])[:, 0])
    return torch.cat(drawn_log_probs)
