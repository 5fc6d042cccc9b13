"""Guessed tokens change no batch: each schedule on real engines, with drafts of random sources."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from hybridrl.config.loss import Loss
from hybridrl.config.schedule import SCHEDULES, ScheduleKind
from hybridrl.engines.rollout.draft_lengths import FixedLength
from hybridrl.engines.rollout.interface import Output, Request, SamplingParams
from hybridrl.engines.rollout.native import NativeEngine
from hybridrl.engines.rollout.random import stream_key
from hybridrl.engines.rollout.speculation import Speculation
from hybridrl.flow import Flow, recipe
from hybridrl.flow.executor import Advanced, Park, Parked, Resume, Sampling, Submit
from hybridrl.flow.lengths import LengthModel, PromptKey
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.fused import Fused
from hybridrl.schedule.instances import RoundLimits
from hybridrl.schedule.loop_schedule import LoopSchedule
from hybridrl.schedule.packed import Packed
from hybridrl.schedule.partial import Partial
from hybridrl.schedule.serial import SerialSchedule

VOCAB, MOST, STEPS = 24, 40, 4


class ToyLoss(Loss):
    fields = ("advantages", "old_log_probs", "reference_log_probs")

    def __call__(self, log_probs, entropy, fields):
        raise AssertionError("only what it reads matters here")


@recipe("drafted")
def drafted(flow: Flow, cfg: dict[str, Any]) -> None:
    """GRPO with a reference."""
    samples = flow.actor.generate(flow.prompts, num_samples=3)
    samples = flow.reference.log_probs(flow.reward.score(samples))
    samples = samples.by_group(lambda rewards: [r - max(rewards) for r in rewards])
    flow.actor.update(samples, loss=ToyLoss())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=128,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


class RandomSource:
    """Guesses of random lengths; of the tokens that an engine without drafts makes, most."""

    def __init__(self, seed: int, tokens: dict[Any, list[int]]) -> None:
        self._draw, self._tokens = random.Random(seed), tokens

    def begin(self, request: Request) -> None: ...

    def end(self, request: Request) -> None: ...

    def siblings(self, request: Request) -> dict[object, list[int]]:
        return {}

    def draft(self, request: Request, most: int) -> Sequence[int]:
        right = self._tokens.get(request.id, [])[len(request.response_ids) :]
        return [
            right[i] if i < len(right) and self._draw.random() < 0.8 else self._draw.randrange(24)
            for i in range(self._draw.randrange(9))
        ]


def executor_of(virtual_executor, model, seed, counts_tokens, tokens, speculates):
    """The virtual executor, whose instances decode with engines as an actor does."""

    class EngineExecutor(virtual_executor):
        def __init__(self) -> None:
            super().__init__(2, seed)
            self.tokens = tokens
            self.engines = [self._engine(i) for i in range(2)]

        def _engine(self, number: int) -> NativeEngine:
            source = RandomSource(seed + number, tokens)
            speculation = Speculation(source, FixedLength(6)) if speculates else None
            engine = NativeEngine(
                model.config, dtype=torch.float32, device=torch.device("cpu"), max_running=64,
                block_size=4, kv_cache_tokens=0, max_sequence=64, speculation=speculation,
            )  # fmt: skip
            engine.load_weights(model.state_dict().items())
            return engine

        def advance(self, instance, commands, num_decode_steps, enough_turns=8) -> None:
            self._occupy(instance)
            engine, left = self.engines[instance], self._left[instance]
            parked: list[Parked] = []
            for command in commands:
                match command:
                    case Submit(ids=ids, prompt=prompt, sampling=sampling):
                        for id in ids:
                            self.prompts[id], self._spans[id], left[id] = prompt, [], 1
                        engine.submit([request_of(id, sampling) for id in ids])
                    case Park(ids=ids):
                        requests = {r.id: r for r in engine.park(ids)}
                        for id, request in requests.items():
                            del left[id]
                            self._grown(id, len(request.response_ids))
                        counts = tuple(r.num_tokens for r in requests.values())
                        parked.append(Parked(tuple(requests), counts, self.version, requests))
                    case Resume(ids=ids, parked=before):
                        left |= dict.fromkeys(ids, 1)
                        engine.submit([before.state[id] for id in ids])
            engine.begin_call(num_decode_steps if counts_tokens else None)
            finished, steps = [], 0
            while steps < num_decode_steps and unfinished(engine) and not engine.call_is_done:
                finished += [self._finished(output, instance) for output in engine.step()]
                steps += 1
            self._random.shuffle(finished)
            self._push(Advanced(instance, len(left), tuple(finished), tuple(parked)))

        def _grown(self, id, num) -> None:
            before = self._spans[id][-1].stop if self._spans[id] else 0
            self._grow(id, num - before)

        def _finished(self, output: Output, instance: int):
            id = output.id
            self._grown(id, len(output.token_ids))
            self._lengths[id] = len(output.token_ids), output.finish == "length"
            del self._left[instance][id]
            self.tokens[id] = output.token_ids
            return self._finish(id, instance)

    return EngineExecutor()


def request_of(id, sampling: Sampling) -> Request:
    prompt = [1 + (id.prompt * 7 + i) % (VOCAB - 1) for i in range(1 + id.prompt % 5)]
    params = SamplingParams(sampling.max_new_tokens, stop_token_ids=(0, 5))
    return Request(id, prompt, params, stream_key(0, *id), prefix=(id.prompt, id.branch))


def unfinished(engine: NativeEngine) -> int:
    return engine.stats().running + engine.stats().waiting


def schedule_of(kind: ScheduleKind, executor):
    step = (
        drafted.build({}),
        executor,
        ((i, f"prompt {i}") for i in range(10_000)),
        StepSettings(sampling=Sampling(max_new_tokens=MOST), decode_steps=5, prompts_per_step=4),
    )
    overlapped = {
        "limits": RoundLimits(max_held=64, chunk_tokens=50),
        "length_model": LengthModel(key_of=lambda prompt: PromptKey(prompt, "task", (1, 2, 3))),
    }
    match kind:
        case ScheduleKind.serial:
            return SerialSchedule(*step)
        case ScheduleKind.fused:
            return LoopSchedule(*step, Fused(migration_threshold=5), **overlapped)
        case ScheduleKind.partial:
            policy = Partial(over_provision=2.0, max_staleness=1)
            return LoopSchedule(*step, policy, **overlapped)
        case ScheduleKind.packed:
            policy = Packed(max_wait_steps=3, limit_tokens=10)
            return LoopSchedule(*step, policy, **overlapped)


ON_SHARED_RANKS = [kind for kind, entry in SCHEDULES.items() if not entry.separate]


@pytest.mark.long
@pytest.mark.parametrize("kind", ON_SHARED_RANKS, ids=lambda kind: kind.value)
def test_the_batch_is_that_without_drafts(virtual_executor, model, kind) -> None:
    def run(seed: int, speculates: bool, tokens: dict[Any, list[int]]):
        counts = SCHEDULES[kind].counts_tokens
        executor = executor_of(virtual_executor, model, seed, counts, tokens, speculates)
        schedule = schedule_of(kind, executor)
        steps = []
        for step in range(STEPS):
            used = schedule.run_step(step).samples
            steps.append([(s.id, s.response_tokens, s.spans, executor.tokens[s.id]) for s in used])
        return steps, [engine.stats() for engine in executor.engines]

    tokens: dict[Any, list[int]] = {}
    wanted, plain = run(0, False, tokens)
    assert all(stats.drafted_tokens == 0 for stats in plain)
    batches, stats = run(1, True, dict(tokens))
    assert batches == wanted
    assert all(0 < s.accepted_tokens < s.drafted_tokens for s in stats)
    assert sum(s.decode_steps for s in stats) < sum(s.decode_steps for s in plain)
