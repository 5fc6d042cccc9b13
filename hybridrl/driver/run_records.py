"""The records of a run: metrics, events, spans, texts of samples.

The driver writes it through `hybridrl.telemetry`; docs/telemetry.md lists files and keys.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, pstdev
from types import MappingProxyType
from typing import Any

from hybridrl.flow.judgements import OK, failed_status, score_of
from hybridrl.flow.ledger import Drop, DropReason
from hybridrl.flow.sample import ENVIRONMENT_FAILURE, Sample, SampleId
from hybridrl.flow.versions import RunRecord, failures_of, record_to_json
from hybridrl.layout.weight_switch import SwitchStats
from hybridrl.schedule import StepResult
from hybridrl.system.memory import MemoryReading
from hybridrl.telemetry.run import Telemetry
from hybridrl.telemetry.trace import TimeSpan, rank_lane
from hybridrl.workers.sample_writer import SampleFacts
from hybridrl.workers.turns import SampleTexts

ThenTexts = Callable[[Mapping[SampleId, SampleTexts]], None]
ReadTexts = Callable[[Mapping[int, list[SampleId]], ThenTexts], None]
"""Begins to read samples as text, by the rank that holds them; the second argument gets the texts
when they have come, maybe in the next step.
"""

KindsOf = Callable[[int], Sequence[str]]
OriginOf = Callable[[int], tuple[str, str]]
"""Source and task of the prompt at a position in the run."""

ObserveRewards = Callable[[Mapping[int, Sequence[float]]], Mapping[str, float]]
"""Called with the rewards of a step's samples by prompt position; gives metrics."""


class RunRecords:
    """Turns answers of ranks and results of steps into the run's records.

    `current_step` gives the run's step, to which weight switches belong. Of each step the
    texts of the first `samples_per_step` samples are kept. `kinds_of` a prompt's position in the
    run are the parts of the mixture that it belongs to. Each has separate metrics. `origin_of`
    a position are its prompt's source and task. `observe` is called with the results of each step.
    `driver_metrics` gives those of judges and environments that the driver calls, since its last
    call.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        samples_per_step: int,
        current_step: Callable[[], int],
        kinds_of: KindsOf,
        origin_of: OriginOf,
        observe: ObserveRewards = lambda rewards: {},
        driver_metrics: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.telemetry, self.samples_per_step = telemetry, samples_per_step
        self.current_step, self.kinds_of, self.origin_of = current_step, kinds_of, origin_of
        self.observe = observe
        self.driver_metrics = driver_metrics
        self._noted_no_training = self._noted_no_rewards = self._noted_no_mismatch = False

    # -- callbacks -----------------------------------------------------------------------------

    def on_span(self, lane: str, span: TimeSpan, step: int) -> None:
        """A rank has done a piece of work for `step`, which belongs on `lane` of the trace."""
        self.telemetry.span(lane, span.name, span.start, span.end, step)

    def on_memory(self, rank: int, memory: MemoryReading) -> None:
        """A rank has measured its memory."""
        self.telemetry.memory(rank_lane(rank), memory.when, memory.held)

    def on_switch(self, switches: Sequence[SwitchStats]) -> None:
        """All ranks have switched weights.

        Bytes are summed over the ranks; of times and of extra memory the worst rank counts.
        """
        received = [int(switch.bytes_received) for switch in switches]
        self.telemetry.event(
            "switch",
            step=self.current_step(),
            bytes=sum(received),
            bytes_theory=sum(int(switch.bytes_theory) for switch in switches),
            bytes_most=max(received),
            seconds=max(switch.seconds for switch in switches),
            pack_s=max(switch.seconds_pack for switch in switches),
            wait_s=max(switch.seconds_wait for switch in switches),
            copy_s=max(switch.seconds_copy for switch in switches),
            scratch_bytes=max(switch.scratch_bytes for switch in switches),
            held_bytes=max(switch.bytes_held for switch in switches),
            proof_s=max(switch.proof_seconds for switch in switches),
            proof_bytes=sum(int(switch.proof_bytes) for switch in switches),
            path=switches[0].path,
        )

    def on_push(self, kind: str, **facts: Any) -> None:
        """Weights were pushed, or loaded by instances."""
        self.telemetry.event(kind, step=self.current_step(), **facts)

    # -- steps ---------------------------------------------------------------------------------

    def record_step(
        self, result: StepResult, seconds: float, read_texts: ReadTexts
    ) -> dict[str, float]:
        """Record a step that took so many seconds; answers with its metrics."""
        step, metrics = self.current_step(), step_metrics(result, seconds)
        metrics |= metrics_by_kind(result.dispatched, self.kinds_of)
        # Before `observe`: a curriculum then forgets the step's prompts.
        self.record_samples(result.dispatched, read_texts, result.dropped)
        metrics |= self.observe(rewards_by_prompt(result.dispatched))
        metrics |= self.driver_metrics()
        self._note_no_training(result, metrics)
        self._note_no_rewards(result.dispatched)
        self._note_no_mismatch(metrics)
        end = 0.0
        for span in sorted(result.spans, key=lambda span: span.start):
            # A lane's slices must not overlap, and a schedule's stages may.
            lane = "driver" if span.start >= end else f"driver/{span.name}"
            self.telemetry.span(lane, span.name, span.start, span.stop, step)
            end = max(end, span.stop)
        self.telemetry.log(step, metrics)
        self.telemetry.lengths(
            step,
            [sample.response_tokens for sample in result.dispatched],
            prompts=[sample.id.prompt for sample in result.dispatched],
            prompt_tokens=[sample.prompt_tokens for sample in result.dispatched],
        )
        if result.versions:
            record = RunRecord(result.versions, failures_of(result.dispatched))
            self.telemetry.versions(step, record_to_json(record))
        return metrics

    def record_samples(
        self,
        samples: Sequence[Sample],
        read_texts: ReadTexts,
        dropped: Mapping[SampleId, Drop] | None = None,
    ) -> None:
        """Record the texts of the step's first samples; without `dropped`, not whether used."""
        facts: dict[SampleId, dict[str, Any]] = {}
        for sample in samples[: self.samples_per_step]:
            source, task = self.origin_of(sample.id.prompt)
            facts[sample.id] = {"source": source, "task": task}
            if dropped is not None:
                drop = dropped.get(sample.id)
                facts[sample.id]["drop_reason"] = drop and drop.reason.value
        step = self.current_step()

        def record(lines: list[dict[str, Any]]) -> None:
            self.telemetry.samples(step, lines)

        self._read(samples, read_texts, record, facts)

    def record_evaluated(
        self, name: str, step: int, samples: Sequence[Sample], read_texts: ReadTexts
    ) -> None:
        """Record samples of the evaluation set `name` after `step`."""

        def record(texts: list[dict[str, Any]]) -> None:
            lines = [{"set": name, **text} for text in texts]
            self.telemetry.samples(step, lines, phase="evaluation")

        self._read(samples, read_texts, record)

    def _note_no_training(self, result: StepResult, metrics: dict[str, float]) -> None:
        """Say it, the first time, where a step had nothing to train on."""
        trained = any(name.rpartition("/")[2] == "loss" for name in result.metrics)
        if self._noted_no_training or trained:
            return
        self._noted_no_training = True
        step, failed = self.current_step(), without_scores(result.dispatched)
        parts = [f"step {step}: nothing to train on", *failed]
        if (left_out := metrics["samples/filtered"]) or not failed:
            parts.append(
                f"{left_out:g} samples left out; where the rewards of a prompt's samples are all "
                "alike, there is nothing to learn"
            )
        self.telemetry.note(", ".join(parts), step=step)

    def _note_no_rewards(self, samples: Sequence[Sample]) -> None:
        """Say it, the first time, where the judge has failed with every sample of a step."""
        failed = [failed_status(sample, ("reward_status",)) for sample in samples]
        if self._noted_no_rewards or not samples or None in failed:
            return
        self._noted_no_rewards = True
        step = self.current_step()
        self.telemetry.note(
            f"step {step}: no sample has a reward; the first: {failed[0]}",
            step=step,
        )

    def _note_no_mismatch(self, metrics: dict[str, float]) -> None:
        """Say it, the first time, where all tokens of a step are of older weights."""
        is_compared = "mismatch/mean" in metrics or not metrics.get("samples/off_policy_tokens")
        if self._noted_no_mismatch or is_compared:
            return
        self._noted_no_mismatch = True
        step = self.current_step()
        self.telemetry.note(
            f"step {step}: mismatch/* compares engines at equal weights, and no sample had the"
            " trainer's before they changed: such steps have staleness/* alone",
            step=step,
        )

    def _read(
        self,
        samples: Sequence[Sample],
        read_texts: ReadTexts,
        record: Callable[[list[dict[str, Any]]], None],
        facts: Mapping[SampleId, dict[str, Any]] = MappingProxyType({}),
    ) -> None:
        """Have `record` called with what is known of the first samples, their texts and `facts`.

        Samples whose instance has died meanwhile have a line without texts.
        """
        shown = samples[: self.samples_per_step]
        by_rank: dict[int, list[SampleId]] = defaultdict(list)
        for sample in shown:
            by_rank[sample.rank].append(sample.id)
        others = [name for name in judged(shown) if name != "reward"]
        read_texts(
            by_rank,
            lambda texts: record(
                [_as_line(one, texts.get(one.id), others) | facts.get(one.id, {}) for one in shown]
            ),
        )


def _as_line(sample: Sample, texts: SampleTexts | None, others: Sequence[str]) -> dict[str, Any]:
    """A line of samples.jsonl; `others` are scores besides the reward."""
    return {
        "id": str(sample.id),
        "prompt": texts and texts.prompt,
        "response": texts and texts.response,
        "reward": _score(sample, "reward"),
        "status": sample.scalars.get("reward_status"),
        "tokens": sample.response_tokens,
        "finish": sample.scalars.get("finish"),
        "advantage": sample.scalars.get("advantage"),
        **{name: _score(sample, name) for name in others},
        **(_turns(texts) if texts else {}),
        **_failure(sample),
    }


def _turns(texts: SampleTexts) -> dict[str, Any]:
    """The turns of a conversation."""
    return {"turns": [turn._asdict() for turn in texts.turns]} if texts.turns else {}


def _score(sample: Sample, name: str) -> Any:
    """A judge's score, null where it has failed; a recipe's own reward has no judge's status."""
    return None if _has_failed(sample, name) else sample.scalars.get(name)


def _has_failed(sample: Sample, name: str) -> bool:
    """Whether the scalar `name` is a score that its judge did not give."""
    return failed_status(sample, (f"{name}_status",)) is not None


def _failure(sample: Sample) -> dict[str, Any]:
    """How a conversation's episode has failed, if it has."""
    kind = sample.scalars.get(ENVIRONMENT_FAILURE)
    return {} if kind is None else {"failure": kind}


def judged(samples: Sequence[Sample]) -> list[str]:
    """Fields with a score of these samples, of whatever judged them: each has a status."""
    names = {name: None for sample in samples for name in sample.scalars}
    return [name for name in names if f"{name}_status" in names]


def without_scores(samples: Sequence[Sample]) -> list[str]:
    """For each score that samples lack, as their judge failed: how many, and the first reason."""
    texts = []
    for name in judged(samples):
        failed = [x for sample in samples if (x := failed_status(sample, (f"{name}_status",)))]
        if failed:
            reason = failed[0].removeprefix(f"{name}: ")
            texts.append(f"{len(failed)} samples without a {name} ({reason})")
    return texts


def rewards_by_prompt(samples: Sequence[Sample]) -> dict[int, list[float]]:
    """The rewards of a step's samples by prompt position; none where nothing has judged them."""
    rewards: dict[int, list[float]] = {sample.id.prompt: [] for sample in samples}
    for sample in samples:
        if (reward := score_of(sample, "reward")) is not None:
            rewards[sample.id.prompt].append(reward)
    return rewards


def sample_facts(result: StepResult, origin_of: OriginOf) -> dict[int, list[SampleFacts]]:
    """All that is known of a step's samples, by the rank that holds their tensors."""
    by_rank: dict[int, list[SampleFacts]] = defaultdict(list)
    for sample in result.dispatched:
        source, task = origin_of(sample.id.prompt)
        drop = result.dropped.get(sample.id)
        scores = {name: x for name, x in sample.scalars.items() if not _has_failed(sample, name)}
        facts = SampleFacts(sample.id, source, task, sample.spans, scores, drop)
        by_rank[sample.rank].append(facts)
    return by_rank


def metrics_by_kind(samples: Sequence[Sample], kinds_of: KindsOf) -> dict[str, float]:
    """`KIND/reward_mean`, `/response_tokens_mean` and `/samples`, of samples with a reward."""
    by_kind: dict[str, list[Sample]] = defaultdict(list)
    kinds: dict[int, Sequence[str]] = {}  # a prompt has many samples
    for sample in samples:
        if score_of(sample, "reward") is not None:
            prompt = sample.id.prompt
            if prompt not in kinds:
                kinds[prompt] = kinds_of(prompt)
            for kind in kinds[prompt]:
                by_kind[kind].append(sample)
    metrics: dict[str, float] = {}
    for kind, of_kind in by_kind.items():
        metrics |= {
            f"{kind}/reward_mean": fmean(s.number("reward") for s in of_kind),
            f"{kind}/response_tokens_mean": fmean(s.model_tokens for s in of_kind),
            f"{kind}/samples": float(len(of_kind)),
        }
    return metrics


def step_metrics(result: StepResult, seconds: float) -> dict[str, float]:
    """The metrics of a step: the actor's own, rewards, lengths, rates, stage seconds."""
    samples = result.dispatched
    metrics = {name.removeprefix("actor/"): value for name, value in result.metrics.items()}
    reasons = [drop.reason for drop in result.dropped.values()]
    by_choice = (DropReason.FILTER, DropReason.TAKE, DropReason.UNUSED)
    metrics |= {
        "step_s": seconds,
        "samples/filtered": float(sum(reason in by_choice for reason in reasons)),
        "samples/join_dropped": float(reasons.count(DropReason.JOIN)),
        "samples/judge_dropped": float(reasons.count(DropReason.JUDGE)),
        "samples/aborted": float(reasons.count(DropReason.ABORTED)),
    }
    if trained := result.metrics.get("samples/trained_tokens"):
        old_tokens = result.metrics["samples/off_policy_tokens"]
        metrics["samples/off_policy_share"] = old_tokens / trained
    if "samples/generated_tokens" in metrics:  # ranks that train do so on copies, meanwhile
        metrics["tokens_per_s/rollout"] = metrics["samples/generated_tokens"] / seconds
        metrics["tokens_per_s/actor"] = metrics["samples/tokens"] / seconds
    metrics |= {f"{name.replace(' ', '_')}_s": s for name, s in result.seconds_by_stage.items()}
    for name in ("kl", *judged(samples)):
        if values := [x for s in samples if (x := score_of(s, name)) is not None]:
            metrics |= {f"{name}_mean": fmean(values), f"{name}_std": pstdev(values)}
        key = f"{name}_status"
        failed = [s.scalars[key] for s in samples if key in s.scalars and s.scalars[key] != OK]
        for status in ("error", "timeout") if name != "kl" else ():
            count = sum([str(reason).startswith(status) for reason in failed])
            if count or name == "reward":
                metrics[f"{name}_{status}"] = float(count)
    lengths = sorted(sample.model_tokens for sample in samples)
    if lengths:
        metrics |= {
            "response_tokens_mean": fmean(lengths),
            "response_tokens_p10": float(lengths[len(lengths) // 10]),
            "response_tokens_p90": float(lengths[len(lengths) * 9 // 10]),
            "response_tokens_max": float(lengths[-1]),
            "tokens_per_s": sum([sample.tokens for sample in samples]) / seconds,
            "samples_per_s": len(samples) / seconds,
        }
    return metrics
