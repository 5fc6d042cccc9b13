"""The samples and the costs of a what-if run, by the texts that name them."""

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridrl.config import ConfigError
from hybridrl.costs.instance import Costs
from hybridrl.flow.executor import Scope
from hybridrl.flow.sample import SampleId

LENGTHS = (
    "a run's directory, FILE.jsonl with {lengths: [...]} a line, lmsys, or "
    "lognormal:median=M,sigma=S[,max=N][,alike=A][,seed=K][,accept=P]"
)


def known_guesses(lengths_key: str, costs_key: str) -> str:
    """What says how many guesses are right, by the keys of lengths and costs."""
    return f"accept=P in {lengths_key}, the share of right guesses, or {costs_key} of a run with it"


@dataclass(frozen=True, slots=True)
class Group:
    """A prompt and the response tokens of its samples."""

    prompt_tokens: int
    lengths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups in the order of the prompt stream, which repeats after the last one.

    `prompts_per_step` and `num_steps` are those of the recorded run. A guessed token is right with
    probability `accept`, once those before it were; None where the lengths do not say.
    """

    groups: tuple[Group, ...]
    prompts_per_step: int
    num_steps: int
    accept: float | None = None

    @property
    def group_size(self) -> int:
        """Samples of a prompt; of the largest group, if groups differ."""
        return max(len(group.lengths) for group in self.groups)

    def cut_at(self, max_tokens: int | None) -> "Workload":
        """Return this workload with responses of at most so many tokens."""
        if max_tokens is None:
            return self
        groups = (
            Group(group.prompt_tokens, tuple(min(n, max_tokens) for n in group.lengths))
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def length_of(self, id: SampleId) -> int:
        """Response tokens of a sample."""
        lengths = self.groups[id.prompt % len(self.groups)].lengths
        return lengths[id.k % len(lengths)]

    def prompt_tokens_of(self, position: int) -> int:
        """Tokens of the prompt at a position of the stream."""
        return self.groups[position % len(self.groups)].prompt_tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths whose logarithm is normal: `sigma` is its standard deviation; p99 / p50 is
    exp(2.33 sigma). Cut off at `max` tokens. `accept` is that of the `Workload`.

    `alike` is the share of the logarithm's variance that a prompt's samples have in common. At 0
    they are independent, at 1 they have one length.
    """

    median: float
    sigma: float
    max: int = 2**31
    seed: int = 0
    alike: float = 0.0
    accept: float | None = None

    def draw(self, num_groups: int, group_size: int, prompt_tokens: int) -> Iterator[Group]:
        """Groups of independent lengths, the same ones for the same seed."""
        draw = random.Random(self.seed)
        of_prompt = self.sigma * math.sqrt(self.alike)
        of_sample = self.sigma * math.sqrt(1 - self.alike)
        for _ in range(num_groups):
            shared = draw.gauss(0.0, of_prompt) if self.alike else 0.0
            lengths = [
                round(self.median * draw.lognormvariate(shared, of_sample))
                for _ in range(group_size)
            ]
            yield Group(prompt_tokens, tuple(min(max(1, n), self.max) for n in lengths))


# LMSYS-Chat-1M (arXiv 2309.11998, table 1): 214.5 tokens a response on average. RLHFuse (arXiv
# 2409.13221, section 2) gives its 99.9th percentile as more than ten times the median, which a
# log-normal has at sigma = ln(10) / 3.09; with that mean its median is 163.
LMSYS = LogNormal(median=163.0, sigma=0.745)
_PUBLISHED = {"lmsys": LMSYS}


@dataclass(kw_only=True, slots=True)
class Shape:
    """The user's shape of a step; None is the recorded value, or the default.

    `seed` is that of a distribution which names none.
    """

    prompts_per_step: int | None = None
    group_size: int | None = None
    num_steps: int | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    seed: int = 0
    defaults: Mapping[str, int] = field(
        default_factory=lambda: {"prompts": 32, "group": 8, "steps": 4, "prompt_tokens": 128}
    )

    def of(self, value: int | None, name: str) -> int:
        """`value`, or the default."""
        return self.defaults[name] if value is None else value


def read_workload(text: str, shape: Shape) -> Workload:
    """The workload that `--lengths` names; raises `ConfigError` for anything else than `LENGTHS`.

    A distribution is drawn in `shape`; a recorded workload keeps its own, except for the values
    that the user sets.
    """
    distribution, _, settings = text.partition(":")
    if text in _PUBLISHED:
        return _drawn(_PUBLISHED[text], shape)
    if distribution == "lognormal":
        return _drawn(_log_normal(text, settings, shape.seed), shape)
    path = Path(text)
    file = path / "lengths.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError("--lengths", text, LENGTHS)
    rows = _rows(text, file)
    steps = [_groups(text, row, shape) for row in rows]
    groups = tuple(group for step in steps for group in step)
    prompts_per_step = shape.prompts_per_step or max(len(step) for step in steps)
    num_steps = shape.num_steps or max(1, len(groups) // prompts_per_step)
    return Workload(groups, prompts_per_step, num_steps).cut_at(shape.max_tokens)


def _log_normal(text: str, settings: str, seed: int) -> LogNormal:
    parameters = dict(item.split("=", 1) for item in settings.split(",") if "=" in item)
    try:
        drawn = LogNormal(
            median=float(parameters.pop("median")),
            sigma=float(parameters.pop("sigma")),
            max=int(parameters.pop("max", 2**31)),
            seed=int(parameters.pop("seed", seed)),
            alike=float(parameters.pop("alike", 0)),
            accept=float(parameters.pop("accept")) if "accept" in parameters else None,
        )
    except (KeyError, ValueError):
        raise ConfigError("--lengths", text, LENGTHS) from None
    if parameters:
        raise ConfigError("--lengths", text, LENGTHS)
    if not (0 < drawn.median < 1e9 and 0 <= drawn.sigma < 10 and drawn.max >= 1):
        allowed = "median above 0, sigma from 0 to 10, max 1 or more"
        raise ConfigError("--lengths", text, allowed)
    if not 0 <= drawn.alike <= 1:
        raise ConfigError("--lengths", text, "alike from 0 to 1")
    if drawn.accept is not None and not 0 <= drawn.accept <= 1:
        raise ConfigError("--lengths", text, "accept between 0 and 1")
    return drawn


def _drawn(lengths: LogNormal, shape: Shape) -> Workload:
    prompts = shape.of(shape.prompts_per_step, "prompts")
    steps = shape.of(shape.num_steps, "steps")
    # A partial schedule starts more prompts than it trains on: no prompt repeats.
    drawn = lengths.draw(
        prompts * (steps + 2),
        shape.of(shape.group_size, "group"),
        shape.of(shape.prompt_tokens, "prompt_tokens"),
    )
    return Workload(tuple(drawn), prompts, steps, lengths.accept).cut_at(shape.max_tokens)


def _rows(text: str, file: Path) -> list[dict[str, Any]]:
    """A row a step: the last one of a repeated step; only RL steps if there are any."""
    allowed = "lines of JSON with lengths: [response tokens, ...]"
    last_row: dict[Any, dict[str, Any]] = {}
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
        for number, line in enumerate(lines):
            row = json.loads(line)
            row = {"lengths": row} if isinstance(row, list) else row
            key = (row.get("phase"), row["step"]) if "step" in row else number
            if not all(isinstance(n, int) and n >= 0 for n in row["lengths"]):
                raise ValueError(line)
            if row["lengths"]:
                last_row[key] = row
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        raise ConfigError("--lengths", text, allowed) from None
    rows = [row for row in last_row.values() if row.get("phase", "rl") == "rl"] or [
        *last_row.values()
    ]
    if not rows:
        raise ConfigError("--lengths", text, allowed)
    return rows


def _groups(text: str, row: Mapping[str, Any], shape: Shape) -> list[Group]:
    """The groups of a step: by the prompts' positions, or so many consecutive samples each."""
    lengths = row["lengths"]
    size = shape.group_size or 1
    positions = row.get("prompts") or [i // size for i in range(len(lengths))]
    prompt_tokens = row.get("prompt_tokens") or [
        shape.of(shape.prompt_tokens, "prompt_tokens")
    ] * len(lengths)
    if not len(positions) == len(prompt_tokens) == len(lengths):
        raise ConfigError("--lengths", text, "prompts and prompt_tokens for each of lengths")
    lengths_by_prompt: dict[Any, list[int]] = {}
    tokens: dict[Any, int] = {}
    for position, prompt, length in zip(positions, prompt_tokens, lengths, strict=True):
        lengths_by_prompt.setdefault(position, []).append(length)
        tokens[position] = shape.prompt_tokens or prompt
    return [Group(tokens[p], tuple(lengths_by_prompt[p])) for p in lengths_by_prompt]


def read_costs(path: Path) -> dict[str, Any]:
    """Return costs, scopes, sizes from `RUN/costs.json`, or a file of its form or of costs alone.

    Raises `ConfigError`.
    """
    file = path / "costs.json" if path.is_dir() else path
    checks: Mapping[str, Callable[[Any], bool]] = {
        **dict.fromkeys(("num_instances", "max_held", "decode_steps", "chunk_tokens"), _is_count),
        "verifier_s": lambda x: isinstance(x, int | float) and not isinstance(x, bool) and x >= 0,
    }
    try:
        record = json.loads(file.read_text())
        if not isinstance(record, dict):
            raise ValueError("not an object")
        facts = record if "costs" in record else {"costs": record}
        costs = Costs.from_json(_of_this_version(facts["costs"], file.name == "costs.json"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        allowed = f"a run's directory with costs.json, or FILE.json with costs ({reason})"
        raise ConfigError("--costs", str(path), allowed) from None
    for name, fits in checks.items():
        if name in facts and not fits(facts[name]):
            allowed = f"{name} that is a number, not {facts[name]!r}"
            raise ConfigError("--costs", str(path), allowed)
    try:
        scopes = {str(name): Scope(scope) for name, scope in dict(facts.get("scopes", {})).items()}
    except (ValueError, TypeError):
        allowed = f"scopes that map a stage to one of {', '.join(s.value for s in Scope)}"
        raise ConfigError("--costs", str(path), allowed) from None
    known = {name: facts[name] for name in checks if name in facts}
    return {"costs": costs, "scopes": scopes, **known}


def _of_this_version(costs: Any, of_run: bool) -> Any:
    """Without the cost that runs of earlier versions wrote, 0 where they had not measured it."""
    if isinstance(costs, dict) and (of_run or costs.get("fused_train_token_s") == 0):
        return {name: cost for name, cost in costs.items() if name != "fused_train_token_s"}
    return costs


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
