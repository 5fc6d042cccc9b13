"""Role handles: the requests of a recipe to the actor, the critic, the reward, ...

Each is a thin, typed face of one role; a method appends the stage that runs it on the ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybridrl.config.loss import Loss
from hybridrl.flow.graph import (
    ComputeStage,
    GenerateStage,
    SamplingOverrides,
    SourceStage,
    StageMethod,
    UpdateStage,
)
from hybridrl.flow.sample import TURN, TURN_REWARDS, TURN_STATE
from hybridrl.flow.stream import Prompts, Stream

# A loss has names for the fields that it reads; the sample's field often has the singular, or is
# absent because the rollout's own log-probabilities serve.
LOSS_FIELD_ALIASES: dict[str, tuple[str, ...]] = {
    "advantages": ("advantage",),
    "returns": ("return",),
    "rewards": ("reward",),
    "old_log_probs": ("log_probs",),
}


@dataclass(frozen=True)
class RoleHandle:
    """One role of a recipe, by its name."""

    role: str


@dataclass(frozen=True)
class Trainable(RoleHandle):
    """A role with an optimizer."""

    def update(
        self,
        stream: Stream,
        loss: Loss[Any],
        *,
        epochs: int | None = None,
        mini_batches: int | None = None,
        after: int = 0,
        fields: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> None:
        """Train this role on the stream: `epochs` passes of `mini_batches` optimizer steps each.

        Both None: the trainer config's. The run's first `after` steps leave this update out (a
        critic warms up first). A field of `loss.fields` has the same name on the samples, an alias
        (`LOSS_FIELD_ALIASES`), or the name in `fields` (loss field -> sample field). Raises
        `ValueError` for a loss that is no `Loss`, for a field that no stage makes, and for a loss
        of pairs (`loss.samples_per_row`) without pairs.
        """
        stage_name = name or stream.stage_name(f"update_{self.role}")
        for key, value in (("epochs", epochs), ("mini_batches", mini_batches)):
            if value is not None and value < 1:
                raise ValueError(f"{stage_name!r}: got {key}={value}, wanted 1 or more")
        if after < 0:
            raise ValueError(f"{stage_name!r}: got after={after}, wanted 0 or more")
        if not isinstance(loss, Loss):
            raise ValueError(
                f"{stage_name!r}: got a {type(loss).__name__} as its loss, wanted an object whose "
                "class derives from hybridrl.algorithms.Loss"
            )
        if loss.samples_per_row not in (1, stream.samples_per_row):
            raise ValueError(
                f"{stage_name!r}: {type(loss).__name__} looks at {loss.samples_per_row} samples "
                f"together, got a stream of samples_per_row={stream.samples_per_row}; "
                "wanted chosen.pair(rejected)"
            )
        resolved = _loss_fields(stage_name, stream, loss, fields or {})
        stream.then(
            UpdateStage(
                name=stage_name,
                upstream=(stream.stage,),
                role=self.role,
                inputs=tuple(dict.fromkeys(("tokens", *resolved.values()))),
                loss=loss,
                epochs=epochs,
                mini_batches=mini_batches,
                after=after,
                fields=resolved,
                samples_per_row=stream.samples_per_row,
            )
        )


@dataclass(frozen=True)
class FrozenScorer(RoleHandle):
    """A role whose model is not trained itself, on generation instances."""

    def log_probs(
        self, stream: Stream, *, privileged: bool = False, name: str | None = None
    ) -> Stream:
        """Add the tensor `<role>_log_probs` [response_tokens] (or `name`).

        With `privileged` they are those after the prompt of `data.privileged_template`.
        """
        field = name or f"{self.role}_log_probs"
        return _compute(stream, self.role, StageMethod.LOG_PROBS, (field,), privileged=privileged)

    def top_log_probs(
        self, stream: Stream, k: int, *, privileged: bool = False, name: str | None = None
    ) -> Stream:
        """Add the `k` most likely tokens of each position, and their log-probabilities.

        The tensors `<name>_top_ids` and `<name>_top_log_probs` [response_tokens, k], the likeliest
        first; the `name` is by default the role's. `privileged` as for `log_probs`.
        """
        if k < 1:
            raise ValueError(f"top_log_probs of {self.role!r}: got k={k}, wanted 1 or more")
        prefix = name or self.role
        fields = (f"{prefix}_top_ids", f"{prefix}_top_log_probs")
        method = StageMethod.TOP_LOG_PROBS
        return _compute(stream, self.role, method, fields, num_top=k, privileged=privileged)


@dataclass(frozen=True)
class ReferenceHandle(FrozenScorer):
    """The policy as it was at the start."""


@dataclass(frozen=True)
class WeightCopy(FrozenScorer):
    """A copy of a role's weights that `Flow.copy` made."""


@dataclass(frozen=True)
class Teacher(FrozenScorer):
    """Another, usually larger, model to learn from."""


@dataclass(frozen=True)
class ActorHandle(Trainable):
    """The policy that is trained and that generates."""

    def generate(
        self,
        prompts: Prompts,
        num_samples: int = 1,
        *,
        temperature: float | None = None,
        greedy: bool = False,
        top_p: float | None = None,
        top_k: int | None = None,
        max_new_tokens: int | None = None,
        name: str | None = None,
        turns: bool = False,
    ) -> Stream:
        """`num_samples` responses to every prompt; None takes the rollout config's value.

        Adds the tensors `tokens` [prompt_tokens + response_tokens] and `log_probs`
        [response_tokens] (of the distribution that they were drawn from), the scalar `finish`.
        A `name` becomes the samples' branch: part of their identity and of their random streams.
        With `turns` conversations give the tensors `turn` [response_tokens], the number of the
        turn, and `turn_rewards` [turns], what each has earned. Also `turn_state` [turns], a hash of
        what the environment showed before it.
        """
        if not isinstance(prompts, Prompts):
            raise ValueError(f"generate: got {type(prompts).__name__}, wanted flow.prompts")
        stage_name = name or "generate"
        if num_samples < 1:
            raise ValueError(f"{stage_name!r}: got num_samples={num_samples}, wanted 1 or more")
        if greedy and temperature:
            raise ValueError(
                f"{stage_name!r}: got greedy and temperature={temperature}, wanted one"
            )
        stage = GenerateStage(
            name=stage_name,
            upstream=(prompts.stage,),
            role=self.role,
            outputs=(
                "finish",
                "tokens",
                "log_probs",
                *((TURN, TURN_REWARDS, TURN_STATE) if turns else ()),
            ),
            scalars=("finish",),
            branch=name or "",
            num_samples=num_samples,
            sampling=SamplingOverrides(
                temperature=0.0 if greedy else temperature,
                top_p=top_p,
                top_k=top_k,
                max_new_tokens=max_new_tokens,
            ),
        )
        return source(prompts, stage)

    def generate_more(
        self,
        stream: Stream,
        count: str,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        max_new_tokens: int | None = None,
        name: str = "more",
    ) -> Stream:
        """More responses to the prompts of `stream`: as many as the scalar `count` says, from 0.

        It is read on the first sample of each prompt, so it is made by `by_group` or `by_batch`
        before. The result has the new samples alone, with the fields that `generate` adds;
        `Stream.merge` brings both together. `name` is their branch.
        """
        if count not in stream.scalars:
            raise ValueError(
                f"{name!r} wants the scalar {count!r}, which no stage before it makes; "
                f"available are {sorted(stream.scalars)}"
            )
        stage = GenerateStage(
            name=name,
            upstream=(stream.stage,),
            role=self.role,
            outputs=("finish", "tokens", "log_probs"),
            scalars=("finish",),
            branch=name,
            num_samples=None,
            count=count,
            sampling=SamplingOverrides(temperature, top_p, top_k, max_new_tokens),
        )
        return source(Prompts(stream.graph), stage)

    def log_probs(self, stream: Stream, *, name: str | None = None) -> Stream:
        """Add the tensor `old_log_probs` [response_tokens] (or `name`), before any update."""
        return _compute(stream, self.role, StageMethod.LOG_PROBS, (name or "old_log_probs",))


@dataclass(frozen=True)
class CriticHandle(Trainable):
    """A value model; `field` is the field that it adds."""

    field: str = "values"

    def values(self, stream: Stream, *, name: str | None = None) -> Stream:
        """Add the tensor `values` (`cost_values`, or `name`) [response_tokens]."""
        return _compute(stream, self.role, StageMethod.VALUES, (name or self.field,))


@dataclass(frozen=True)
class Judge(RoleHandle):
    """A verifier or a model that scores; the cost of Safe-RLHF is one."""

    def score(
        self,
        stream: Stream,
        *,
        name: str | None = None,
        text: str | None = None,
        parts: Sequence[str] = (),
    ) -> Stream:
        """Add the scalar `reward` (`cost`, or `name`) and `<that>_status`: ok, error or timeout.

        With a name for it also the judged `text`, which `reward.extract` finds in the response. Of
        the `parts` of `reward.kind=sum`, which the config has by these names, also each one's
        score: `reward_NAME`.
        """
        field = name or self.role
        scores = tuple(f"{field}_{judge}" for judge in parts)
        scalars = (field, f"{field}_status", *([text] if text else ()), *scores)
        return stream.then(
            ComputeStage(
                name=stream.stage_name(field),
                upstream=(stream.stage,),
                role=self.role,
                method=StageMethod.SCORE,
                inputs=("tokens",),
                outputs=scalars,
                scalars=scalars,
                parts=tuple(parts),
            )
        )


@dataclass(frozen=True)
class Reward(Judge, Trainable):
    """The judge of responses, and apart from that, a reward model that a recipe trains."""

    def learned_score(self, stream: Stream, *, name: str | None = None) -> Stream:
        """Add the scalar `learned_reward` (or `name`): the score of the model that `update` trains.

        `score` is by the judge in the config, which does not change while this one learns.
        """
        field = name or "learned_reward"
        return stream.then(
            ComputeStage(
                name=stream.stage_name(field),
                upstream=(stream.stage,),
                role=self.role,
                method=StageMethod.LEARNED_SCORE,
                inputs=("tokens",),
                outputs=(field,),
                scalars=(field,),
            )
        )


def source(prompts: Prompts, stage: SourceStage) -> Stream:
    """Append a stage that makes samples from prompts."""
    prompts.graph.add(stage)
    return Stream(
        graph=prompts.graph,
        stage=stage.name,
        scalars=frozenset(stage.scalars),
        tensors=frozenset(stage.outputs) - frozenset(stage.scalars),
        sources=frozenset((stage.name,)),
        num_samples=stage.num_samples,
        branch=stage.branch,
    )


def _compute(
    stream: Stream,
    role: str,
    method: StageMethod,
    fields: tuple[str, ...],
    num_top: int = 0,
    privileged: bool = False,
) -> Stream:
    return stream.then(
        ComputeStage(
            name=stream.stage_name(fields[-1]),
            upstream=(stream.stage,),
            role=role,
            method=method,
            inputs=("tokens",),
            outputs=fields,
            num_top=num_top,
            privileged=privileged,
        )
    )


def _loss_fields(
    stage_name: str, stream: Stream, loss: Loss[Any], renamed: Mapping[str, str]
) -> dict[str, str]:
    """Loss field -> sample field, for everything that the loss reads."""
    unknown = sorted(set(renamed) - set(loss.fields))
    if unknown:
        raise ValueError(
            f"{stage_name!r}: got fields {unknown}, wanted some of {list(loss.fields)}"
        )
    resolved = {}
    for field in loss.fields:
        candidates = (
            (renamed[field],) if field in renamed else (field, *LOSS_FIELD_ALIASES.get(field, ()))
        )
        sample_field = next((c for c in candidates if c in stream.fields), None)
        if sample_field is None:
            raise ValueError(
                f"{stage_name!r}: the loss wants the field {field!r} (as "
                f"{' or '.join(candidates)}), which no stage before it makes; "
                f"available are {sorted(stream.fields)}"
            )
        resolved[field] = sample_field
    return resolved
