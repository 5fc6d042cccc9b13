"""A step of a recipe for real, but for what engines and models would say of the responses."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from hybridrl.algorithms.normalize import token_weights
from hybridrl.config import Attention
from hybridrl.engines.train.interface import TrainSequence, ended
from hybridrl.engines.train.packed import loss_inputs, pack, scored_fields
from hybridrl.flow import Graph
from hybridrl.flow.executor import Sampling
from hybridrl.flow.graph import Stage
from hybridrl.flow.judgements import leaving_failed
from hybridrl.flow.sample import Sample, SampleId
from hybridrl.preflight.prepare import build_recipe
from hybridrl.schedule.base import StepSettings
from hybridrl.schedule.serial import SerialSchedule

RECIPES = Path(__file__).parents[3] / "recipes"
PROMPT_TOKENS, TOP_K = 3, 4
NOW = {
    "actor": "new_log_probs",
    "critic": "new_values",
    "cost_critic": "new_cost_values",
    "reward": "new_reward",
}
"""What the trained model of a role says of a response by now: the loss's first argument."""


def uniform(id: SampleId, name: str, size: int = 1) -> Tensor:
    """[size] from 0 to 1, float64, always the same."""
    seed = zlib.crc32(f"{id} {name}".encode())
    return torch.rand(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Response:
    """A response for the formulas: its fields as the bench has them (`log_probs` of the policy that
    sampled, `old_log_probs` before the update, `new_log_probs` now, ...), and the `advantage` that
    a formula finds.
    """

    advantage: Any

    def __init__(self, bench: "Bench", id: SampleId) -> None:
        self._bench, self.id, self.length = bench, id, bench.length_of(id)

    def __getattr__(self, name: str) -> Any:
        value = self._bench.field(self.id, name)
        if name in (*NOW.values(), "new_candidate_log_probs"):
            value.requires_grad_()
        setattr(self, name, value)
        return value


class Bench:
    """Runs recipes on responses whose every field is given here, by their ids alone.

    A test may set `reward_of`, `answer_of`, and `drift`: log-probabilities of other policies than
    the one that sampled differ by up to that a token. It may also set `status_of`, by id and field,
    and `stops`, with which samples leave whose judge has failed (`leaving_failed`).
    """

    prompts = 4  # of a step
    max_tokens = 10  # of a response

    def __init__(self, executor: Callable[..., Any]) -> None:
        self._executor = executor
        self.more_tensors: Sequence[str] = ("turn", "turn_rewards", "turn_state")
        self.drift = 0.6
        self.answer_of: Callable[[SampleId], str] = str
        self.status_of: Callable[[SampleId, str], str] = lambda id, name: "ok"
        self.stops: dict[str, bool] = {}

    def reward_of(self, id: SampleId) -> float:
        """Quarters; those of prompt 2 are all equal."""
        return 1.0 if id.prompt == 2 else round(4 * uniform(id, "reward").item()) / 4

    def length_of(self, id: SampleId) -> int:
        """Response tokens."""
        return 1 + int(self.max_tokens * uniform(id, "length").item())

    def field(self, id: SampleId, name: str) -> Any:
        """What an engine or a role says of a response."""
        length = self.length_of(id)
        match name:
            case "reward" | "true_reward":
                return self.reward_of(id)
            case "reward_right" | "reward_form" | "reward_told":
                return round(4 * uniform(id, name).item()) / 4
            case "answer":
                return self.answer_of(id)
            case "cost":
                return 2 * uniform(id, name).item() - 0.5
            case "reward_status" | "true_reward_status" | "cost_status":
                return self.status_of(id, name)
            case "tokens":
                return torch.arange(PROMPT_TOKENS + length)
            case "log_probs":
                return -2 * uniform(id, name, length) - 0.1
            case "values" | "cost_values" | "entropy":
                return uniform(id, name, length)
            case "new_values" | "new_cost_values":
                return self.field(id, name.removeprefix("new_")) + uniform(id, name, length) - 0.5
            case "teacher_top_ids":
                return torch.arange(TOP_K).repeat(length, 1)
            case "teacher_top_log_probs" | "new_candidate_log_probs":
                logits = 3 * uniform(id, name, length * (TOP_K + 2)).view(length, -1)
                return logits.log_softmax(-1)[:, :TOP_K]
            case "turn":
                return torch.arange(length) // 3
            case "turn_rewards":
                return 1.0 + torch.arange(1 + (length - 1) // 3)
            case "turn_state":  # many turns begin where others do
                return (3 * uniform(id, name, 1 + (length - 1) // 3)).long()
            case "new_reward":
                return uniform(id, name)
        assert name.endswith("_log_probs"), name
        return self.field(id, "log_probs") + self.drift * (2 * uniform(id, name, length) - 1)

    def mask_of(self, id: SampleId) -> Tensor | None:
        """The tokens that the model wrote; None: all."""
        return None

    def group(self, prompt: int, size: int, branch: str = "") -> list[Response]:
        """The responses to one prompt."""
        return [Response(self, SampleId(prompt, branch, k)) for k in range(size)]

    def groups(self, size: int, branch: str = "") -> list[list[Response]]:
        """The responses to each prompt of the first step."""
        return [self.group(prompt, size, branch) for prompt in range(self.prompts)]

    def run(self, recipe: str, *, steps: int = 1, **keys: Any) -> "TrainedBatch":
        """Steps of a recipe of the package, by its config.yaml and `keys`."""
        config = OmegaConf.create(
            {
                "rollout": {"max_new_tokens": self.max_tokens},
                "reward": {"parts": {}},
                "run": {"seed": 0},
            }
        )
        config["recipe"] = OmegaConf.load(RECIPES / recipe / "config.yaml")
        settings = OmegaConf.to_container(config, resolve=True)["recipe"]
        settings.pop("defaults", None)
        graph = leaving_failed(build_recipe(settings | keys), self.stops)
        executor = self._executor(length_of=self.length_of, outputs_of=self.field)
        executor.more_tensors = self.more_tensors
        sampling = Sampling(max_new_tokens=self.max_tokens)
        step = StepSettings(sampling=sampling, decode_steps=4, prompts_per_step=self.prompts)
        schedule = SerialSchedule(graph, executor, ((i, i) for i in range(100)), step)
        *_, result = (schedule.run_step(number) for number in range(steps))
        return TrainedBatch(self, graph, executor.updates, result.samples)


@dataclass
class TrainedBatch:
    """What a recipe has trained on: `updates` by stage, each with samples and the fields read; the
    last step's samples.
    """

    bench: Bench
    graph: Graph
    updates: list[tuple[str, list[tuple[SampleId, dict[str, Any]]]]]
    samples: tuple[Sample, ...]
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """The metrics of the loss [tokens], after `loss_of`."""

    def scalar(self, name: str) -> list[Any]:
        """A scalar of the last step's samples, as the run's record has it."""
        return [sample.scalars[name] for sample in self.samples]

    def agrees(
        self, responses: list[Response], loss: Tensor, role: str = "actor", **fields: Any
    ) -> None:
        """The last update of `role` read these responses in this order, with their advantages and
        these `fields` of its loss, one a response. Its loss is `loss`, and so are the gradients.
        """
        of_role = ((self.graph.stages[name], seen) for name, seen in self.updates)
        *_, (stage, seen) = (update for update in of_role if update[0].role == role)
        assert [id for id, _ in seen] == [r.id for r in responses]
        names = stage.fields
        if "advantages" in names:
            fields["advantages"] = [r.advantage for r in responses]
        for name, wanted in fields.items():
            for (_, read), y in zip(seen, wanted, strict=True):
                close(torch.as_tensor(read[names[name]]).double(), torch.as_tensor(y).double())
        read = "new_candidate_log_probs" if stage.loss.candidates else NOW[role]
        now = [self.bench.field(r.id, read).requires_grad_() for r in responses]
        value = self.loss_of(stage, seen, now)
        close(value, loss)
        wanted = torch.autograd.grad(loss, [getattr(r, read) for r in responses])
        for x, y in zip(torch.autograd.grad(value, now), wanted, strict=True):
            close(x, y)

    def loss_of(self, stage: Stage, seen: Iterable[Any], now: Sequence[Tensor]) -> Tensor:
        """The batch's loss, as `TrainEngine.update` makes it of the recipe's."""
        loss, names = stage.loss, stage.fields
        sequences = []
        for id, read in seen:
            fields = {name: read[field] for name, field in names.items()}
            fields["entropy"] = self.bench.field(id, "entropy")
            length = len(read["tokens"]) - PROMPT_TOKENS
            mask = self.bench.mask_of(id)
            sequences.append(TrainSequence(read["tokens"], length, fields, mask))
        if loss.needs_last_token_only:
            sequences = [ended(sequence, None) for sequence in sequences]
        row = pack(sequences, Attention.torch, torch.device("cpu"), trained_only=True)
        masks = [sequence.mask for sequence in sequences]
        masked = [x if mask is None else x[mask] for x, mask in zip(now, masks, strict=True)]
        scores = torch.cat([masked[i] for i in row.order])
        if loss.candidates:  # behind the response's own tokens, which it does not read
            scores = torch.cat([torch.zeros(len(scores), 1), scores], 1)
        log_probs, fields = loss_inputs(sequences, row, loss, scores)
        names = ["entropy"] * loss.needs_entropy
        entropy = scored_fields(sequences, row, names).get("entropy")
        values, self.metrics = loss(log_probs, entropy, fields)
        totals = sum(row.counts), len(row.counts), self.bench.max_tokens
        return (token_weights(row.counts, loss.normalize, *totals).double() * values).sum()


def close(got: Tensor, wanted: Tensor) -> None:
    """Equal but for float32 (scalars as fields of tokens, tokens' weights), and the 1e-6 that
    `group_relative` adds to deviations above 0.1.
    """
    torch.testing.assert_close(got, wanted.detach(), rtol=2e-5, atol=1e-7)


@pytest.fixture
def bench(virtual_executor: Any) -> Bench:
    """See `Bench`."""
    return Bench(virtual_executor)


@pytest.fixture(scope="session")
def recipe_names() -> set[str]:
    """Every recipe of the package."""
    return {path.parent.name for path in RECIPES.glob("*/config.yaml")}
