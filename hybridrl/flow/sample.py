"""The driver's metadata of a sample: identity, lengths, scalars, and which tensors exist where."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

NO_RANK = -1  # of a sample that is not finished
NO_VERSION = -1  # of weights before the first switch, and of tokens that no policy made
LOSS_MASK = "loss_mask"  # the tensor of the tokens that are trained, of the dataset's own responses
TRAINED, TURN = "trained", "turn"  # tensors of a conversation: the model's tokens, their turns
TURN_REWARDS = "turn_rewards"  # and what each turn has earned
TURN_STATE = "turn_state"  # a hash of what the environment showed before each turn
ENVIRONMENT_FAILURE = "environment_failure"  # the scalar: how a conversation's episode has failed
OUT_OF_TOKENS = "out_of_tokens"  # the scalar: 1 where the response's limit ended a conversation
NOTE = "note/"  # before the names of scalars that a program notes: no field of a recipe has it

Scalar = float | int | str | list[float]
"""A number, a short string, or a number for each turn of a conversation."""


class SampleId(NamedTuple):
    """Identity of a sample, fixed by prompt position and never by time.

    A tuple, since ranks look samples up and send them by the thousand. The order of ids is the
    order of training. `prompt` is the position in the run's prompt stream (it grows over the whole
    run), `k` the sample's number among those of one prompt. `branch` is the generating stage where
    a recipe has several.
    """

    prompt: int
    branch: str = ""
    k: int = 0

    def __str__(self) -> str:
        return ".".join(filter(None, (str(self.prompt), self.branch, str(self.k))))

    @classmethod
    def read(cls, parts: Sequence[Any]) -> "SampleId":
        """An id as a file has it; those of earlier versions have a fourth part, 0."""
        return cls(*parts[:3])


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Response tokens [start, stop) that one policy version made, or that are not to be trained.

    `version` is the actor's optimizer step at generation; `trained` is False for tokens that an
    environment wrote (multi-turn). With `recomputed` the version has first computed the keys and
    values of all tokens before, where they would have stayed (`schedule.parked_kv=keep`).
    """

    start: int
    stop: int
    version: int
    trained: bool = True
    recomputed: bool = False


@dataclass(kw_only=True, slots=True)
class Sample:
    """Metadata of one sample. Tensors stay on `rank`; only scalars travel to the driver.

    `rank` is that of a finished sample. `scalars` holds what the driver knows by field name
    (`reward`, `advantage`, `finish`, ...); `tensors` names the fields that exist on the sample's
    rank (`tokens`, `log_probs`, ...). These two decide which stages may start on it. Its status is
    in the `Ledger`.
    """

    id: SampleId
    rank: int = NO_RANK
    prompt_tokens: int = 0
    response_tokens: int = 0
    spans: tuple[TokenSpan, ...] = ()
    scalars: dict[str, Scalar] = field(default_factory=dict)
    tensors: set[str] = field(default_factory=set)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, which `from_json` takes back."""
        return {**asdict(self), "id": list(self.id), "tensors": sorted(self.tensors)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Sample":
        """A sample as it was written."""
        return cls(
            id=SampleId.read(values["id"]),
            rank=values["rank"],
            prompt_tokens=values["prompt_tokens"],
            response_tokens=values["response_tokens"],
            spans=tuple(TokenSpan(**span) for span in values["spans"]),
            scalars=dict(values["scalars"]),
            tensors=set(values["tensors"]),
        )

    def number(self, name: str) -> float:
        """The scalar `name`, which is a number."""
        value = self.scalars[name]
        assert not isinstance(value, list), f"{name} of sample {self.id} has a number a turn"
        return float(value)

    @property
    def tokens(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def model_tokens(self) -> int:
        """Tokens of the response without those that an environment wrote."""
        number = self.response_tokens
        for span in self.spans:
            if not span.trained:
                number -= span.stop - span.start
        return number

    def forget(self, names: Iterable[str]) -> None:
        """Fields of these names are to be made again."""
        for name in names:
            self.scalars.pop(name, None)
            self.tensors.discard(name)

    def has(self, name: str) -> bool:
        """Whether the field `name` exists, in the driver or on the rank."""
        return name in self.scalars or name in self.tensors
