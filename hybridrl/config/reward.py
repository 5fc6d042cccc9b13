"""How a response is judged."""

from dataclasses import dataclass
from enum import Enum

from hybridrl.config.errors import ConfigError


class RewardKind(Enum):
    """Which verifier gives the reward."""

    dataset = "dataset"  # the dataset's own scorer (reasoning_gym)
    exact = "exact"  # 1 where the extracted text equals the answer
    regex = "regex"  # 1 where `pattern` matches the whole extracted text
    math = "math"  # 1 where math-verify finds the answers equal
    function = "function"  # a user's function by dotted path


@dataclass(kw_only=True, slots=True)
class RewardConfig:
    """The verifier and the sandboxed processes that it runs in."""

    kind: RewardKind = RewardKind.exact
    """Which verifier."""
    function: str | None = None
    """kind=function: dotted path, `package.module:name` or `/path/file.py:name`.

    It is called as `f(prompt=..., response=..., answer=..., item=...)` and returns a number."""
    extract: str | None = None
    """Regular expression; the last match's first group is what is judged. Null: the whole text."""
    pattern: str | None = None
    """kind=regex: the expression; `{answer}` in it becomes the escaped answer."""
    timeout_s: float = 5.0
    """Seconds for one sample; past it the sample is marked `reward_timeout` and scores 0."""
    num_processes: int = 1
    """Verifier processes per rank."""

    def __post_init__(self) -> None:
        for kind, key in ((RewardKind.regex, "pattern"), (RewardKind.function, "function")):
            if self.kind is kind and not getattr(self, key):
                raise ConfigError(f"reward.{key}", "null", f"a value, for reward.kind={kind.value}")
        if self.timeout_s <= 0:
            raise ConfigError("reward.timeout_s", self.timeout_s, "seconds above 0")
        if self.num_processes < 1:
            raise ConfigError("reward.num_processes", self.num_processes, "1 or more")
