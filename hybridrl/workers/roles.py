"""What one rank makes of its own samples: the inputs of judges, and a recipe's `map`."""

import itertools
from collections.abc import Sequence
from typing import Any

from hybridrl.flow.graph import MapStage
from hybridrl.flow.sample import TRAINED, TURN, TURN_REWARDS, SampleId, Scalar
from hybridrl.models.response_text import ResponseText
from hybridrl.rewards import RewardInput
from hybridrl.workers.store import SampleStore, StoredSample

Scalars = dict[str, tuple[Scalar, ...]]


def reward_inputs(
    store: SampleStore, text_of: ResponseText, ids: Sequence[SampleId]
) -> list[RewardInput]:
    """What a judge sees of samples.

    Of a conversation the response is the model's last turn. The row has a field `conversation`
    then: messages of `assistant` and `environment`, in turn.
    """
    samples = [store[id] for id in ids]
    if samples and TURN in samples[0].tensors:
        return [_conversation_input(sample, text_of) for sample in samples]
    texts = [text_of(sample.response_ids) for sample in samples]
    return [
        RewardInput(
            prompt=sample.item.prompt,
            response=text,
            answer=sample.item.answer,
            item=sample.item.item,
            source=sample.item.source,
            answers=sample.item.answers,
            expected=sample.item.expected,
            question=sample.item.question,
        )
        for sample, text in zip(samples, texts, strict=True)
    ]


def _conversation_input(sample: StoredSample, text_of: ResponseText) -> RewardInput:
    ids, turns = sample.response_ids.tolist(), sample.tensors[TURN].tolist()
    trained = sample.tensors[TRAINED].tolist()
    keys = list(zip(turns, (not by_model for by_model in trained), strict=True))
    messages = []
    for (_, replies), pairs in itertools.groupby(zip(keys, ids, strict=True), lambda pair: pair[0]):
        text = text_of([id for _, id in pairs])
        messages.append({"role": "environment" if replies else "assistant", "content": text})
    spoken = [message["content"] for message in messages if message["role"] == "assistant"]
    return RewardInput(
        prompt=sample.item.prompt,
        response=str(spoken[-1]) if spoken else "",
        answer=sample.item.answer,
        item={**sample.item.item, "conversation": messages},
        source=sample.item.source,
        earned=_earned(sample),
        answers=sample.item.answers,
        expected=sample.item.expected,
        question=sample.item.question,
    )


def _earned(sample: StoredSample) -> float | None:
    """What the turns of a conversation have earned, in sum; None of a sample without turns."""
    rewards = sample.tensors.get(TURN_REWARDS)
    return None if rewards is None else float(rewards.sum())


def run_map(
    stage: MapStage,
    store: SampleStore,
    ids: Sequence[SampleId],
    scalars: Sequence[dict[str, Any]],
) -> tuple[Scalars, tuple[str, ...]]:
    """Run a recipe's own function per sample; see `Stream.map` for its contract."""
    new_scalars: dict[str, list[Any]] = {name: [] for name in stage.scalars}
    tensors = tuple(name for name in stage.outputs if name not in new_scalars)
    for id, fields in zip(ids, scalars, strict=True):
        sample = store[id]
        values = stage.function(
            *(sample.of_model(x) if x in sample.tensors else fields[x] for x in stage.inputs)
        )
        values = values if isinstance(values, tuple) else (values,)
        for name, value in zip(stage.returns, values, strict=True):
            if name in new_scalars:
                new_scalars[name].append(value)
            else:
                sample.tensors[name] = sample.with_replies(value)
    return {name: tuple(values) for name, values in new_scalars.items()}, tensors
