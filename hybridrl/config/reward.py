"""How a response is judged."""

import re
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum

from hybridrl.config.bounds import bounded
from hybridrl.config.endpoint import EndpointConfig
from hybridrl.config.errors import ConfigError


class RewardKind(Enum):
    """The verifiers, and the other sources of a reward."""

    dataset = "dataset"  # the dataset's own scorer (reasoning_gym)
    code = "code"  # a program is run on test cases
    exact = "exact"  # 1 where the extracted text equals the answer
    regex = "regex"  # 1 where `pattern` matches the whole extracted text
    math = "math"  # 1 where math-verify finds the answers equal
    function = "function"  # a user's function by dotted path
    model = "model"  # the score of a reward model
    http = "http"  # a service of yours answers each request with a score
    chat = "chat"  # a language model behind an OpenAI-compatible API answers a rubric
    environment = "environment"  # what the episode has earned
    sum = "sum"  # the weighted sum of several

    @property
    def asks(self) -> bool:
        """Whether it asks an endpoint."""
        return self in (RewardKind.http, RewardKind.chat)


class RewardCall(Enum):
    """The responses that one call of a reward function, or one request, is about."""

    sample = "sample"  # one
    batch = "batch"  # those that are there
    group = "group"  # all responses to a prompt


class OnJudgeFailure(Enum):
    """What becomes of a sample whose judge has failed."""

    drop = "drop"  # it is left out, of its group's statistics and of training
    zero = "zero"  # its score is 0
    stop = "stop"  # the run ends


class JudgeHome(Enum):
    """Where a judge works; `Config.home_of` decides it."""

    rank = "rank"  # in sandboxes of each sample's rank
    instance = "instance"  # a model beside the actor, on its generation instances
    pool = "pool"  # a model on ranks of another pool
    driver = "driver"  # in sandboxes that the driver calls, on every node


class JailKind(Enum):
    """What confines a program that a model has written."""

    auto = "auto"  # the first of the next two that works on this machine
    bubblewrap = "bubblewrap"  # the command bwrap
    namespaces = "namespaces"  # those of the kernel, with Landlock where it is
    off = "off"  # nothing: limits alone


@dataclass(kw_only=True, slots=True)
class JailLimits:
    """What one run of a program may take."""

    seconds: float = bounded(2.0, above=0, allowed="seconds above 0")
    """Wall time."""
    memory_mb: int = bounded(1024, least=64)
    """Address space of each process."""
    processes: int = bounded(16, least=1)
    """Processes and threads at a time."""
    open_files: int = bounded(64, least=16)
    """Files that a process has open."""
    disk_mb: int = bounded(16, least=1)
    """Size of /tmp, the only place to write, which is in memory."""
    output_kb: int = bounded(1024, least=1)
    """Longest output."""


@dataclass(kw_only=True, slots=True)
class JudgeConfig:
    """A verifier and the sandboxed processes that it runs in, or a model that scores."""

    kind: RewardKind = RewardKind.exact
    """Which verifier."""
    function: str | None = None
    """kind=function: dotted path, `package.module:name` or `/path/file.py:name`.

    It is called as `f(prompt=..., response=..., answer=..., item=...)` and returns a number; with
    call=batch or group as `f(prompts=..., responses=..., answers=..., items=...)`, for a list."""
    call: RewardCall = RewardCall.sample
    """kind=function, http, chat: the responses that one call is about. No batch for http, chat."""
    waits: bool | None = None
    """kind=function: whether it waits for something else than a core of this machine. Then up
    to `max_in_flight` samples are judged at a time, on every node, a plain function in threads.
    Null: where the function is `async def`."""
    max_in_flight: int = bounded(32, least=1)
    """Calls of a function that waits, or requests of kind=http and chat, at a time in the run."""
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    """kind=http, chat: who is asked, what, and how the reply is read."""
    model: str | None = None
    """kind=model: a Hugging Face directory or hub name of a sequence classifier with one label,
    whose score at a sample's last token is its reward. With another tokenizer than the actor's it
    reads the text of prompt and response, in its own chat template."""
    extract: str | None = None
    """Regular expression; the last match's first group is judged. Null: the whole text."""
    pattern: str | None = None
    """kind=regex: the expression; `{answer}` in it becomes the escaped answer."""
    timeout_s: float = bounded(5.0, above=0, allowed="seconds above 0")
    """Seconds for one sample (with another `call` for one call); past it the judge has failed. For
    kind=http and chat there is `endpoint.timeout_s`; this bounds what `extract` and
    `endpoint.score` compute."""
    num_processes: int = bounded(1, least=1)
    """Verifier processes per rank; with call=group in the run, one on each node at least."""
    partial_credit: bool = False
    """kind=code: the share of tests that pass is the reward; else 1 where all do, and 0."""
    jail: JailKind = JailKind.auto
    """kind=code, and functions that call `hybridrl.sandbox.jail`: what confines a program."""
    limits: JailLimits = field(default_factory=JailLimits)
    """Likewise: what one run of a program may take."""

    @property
    def is_central(self) -> bool:
        """Whether the driver calls it: since it waits, or sees samples of many ranks."""
        return self.kind.asks or bool(self.waits) or self.call is RewardCall.group

    def check(self, key: str) -> None:
        """Raise ConfigError for settings that cannot work; `key` is their place."""
        needed = {
            RewardKind.regex: "pattern",
            RewardKind.function: "function",
            RewardKind.model: "model",
        }
        name = needed.get(self.kind)
        if name and not getattr(self, name):
            allowed = f"a value, for {key}.kind={self.kind.value}"
            raise ConfigError(f"{key}.{name}", "null", allowed)
        seconds, most = self.limits.seconds, self.timeout_s
        if self.kind is RewardKind.code and seconds > most:
            raise ConfigError(f"{key}.limits.seconds", seconds, f"at most {key}.timeout_s={most:g}")
        self._check_calls(key)

    def _check_calls(self, key: str) -> None:
        """Raise ConfigError for settings of calls that the kind does not have."""
        kind, call = self.kind, self.call
        if kind.asks:
            whole_groups = call is RewardCall.group
            self.endpoint.check(f"{key}.endpoint", kind is RewardKind.chat, whole_groups)
            if call is RewardCall.batch:
                raise ConfigError(f"{key}.call", call.value, f"sample or group, for {kind.value}")
        elif call is not RewardCall.sample and kind is not RewardKind.function:
            raise ConfigError(f"{key}.call", call.value, f"sample, for {key}.kind={kind.value}")
        if self.waits is not None and kind is not RewardKind.function:
            raise ConfigError(f"{key}.waits", self.waits, f"null, for {key}.kind={kind.value}")


@dataclass(kw_only=True, slots=True)
class RewardPartConfig(JudgeConfig):
    """One of several judges."""

    weight: float = 1.0
    """The factor of its score, any number: below 0 it is a penalty, with 0 it is only recorded."""

    def check(self, key: str) -> None:
        """Raise ConfigError for settings that cannot work; `key` is their place."""
        JudgeConfig.check(self, key)
        if self.kind is RewardKind.sum:
            raise ConfigError(f"{key}.kind", self.kind.value, "another kind: a part has no parts")


@dataclass(kw_only=True, slots=True)
class RewardConfig(JudgeConfig):
    """A judge, or several."""

    parts: dict[str, RewardPartConfig] = field(default_factory=dict)
    """kind=sum: the judges, by names of your choice. Each one's score is recorded as
    `reward_NAME`."""
    on_failure: OnJudgeFailure = OnJudgeFailure.drop
    """What becomes of a sample that the judge, or one of the `parts` that count, gives no score."""
    max_failed_share: float = bounded(0.5, above=0, most=1)
    """on_failure=drop: the run ends where more than this share of a step's samples, or of an
    evaluation's, have no score."""

    def check(self, key: str) -> None:
        """Raise ConfigError for settings that cannot work; `key` is their place."""
        JudgeConfig.check(self, key)
        if (self.kind is RewardKind.sum) != bool(self.parts):
            allowed = f"parts with {key}.kind=sum, and with it alone"
            raise ConfigError(f"{key}.parts", list(self.parts), allowed)
        if self.parts:
            self._check_sum(key)
        if self.parts and not any(judge.weight for judge in self.parts.values()):
            weights = {name: judge.weight for name, judge in self.parts.items()}
            raise ConfigError(f"{key}.parts", weights, "a part whose weight is not 0")
        for name, judge in self.parts.items():
            if not _NAME.fullmatch(name) or name == "status":
                allowed = "names of lower-case letters, digits and _, other than status"
                raise ConfigError(f"{key}.parts", name, allowed)
            judge.check(f"{key}.parts.{name}")

    def _check_sum(self, key: str) -> None:
        """Raise ConfigError for a judge's key beside the parts, which no part reads."""
        unset = JudgeConfig()
        for name in (setting.name for setting in fields(JudgeConfig)):
            value = getattr(self, name)
            # data sets bring an `extract`, whichever judge reads it
            if name in ("kind", "extract") or value == getattr(unset, name):
                continue
            shown = value.value if isinstance(value, Enum) else value
            if is_dataclass(value):
                old = getattr(unset, name)
                names = (inner.name for inner in fields(value))
                inner = next(x for x in names if getattr(value, x) != getattr(old, x))
                name, shown = f"{name}.{inner}", getattr(value, inner)
                shown = shown.value if isinstance(shown, Enum) else shown
            allowed = f"it in {key}.parts.NAME.{name}: each part of a sum has its own"
            raise ConfigError(f"{key}.{name}", shown, allowed)


_NAME = re.compile(r"[a-z][a-z0-9_]*")
