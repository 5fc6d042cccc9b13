"""What a client asks of the loop, and what the loop answers.

The HTTP side makes these from the wire and hands them to a `ServeBackend`; the loop behind it knows
nothing of HTTP. Paths have the form `tinker://MODEL/weights/NAME` (with the optimizer's state) and
`tinker://MODEL/sampler_weights/NAME` (weights alone, for sampling). The names follow Tinker's API.
"""

import re
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

Kind = Literal["weights", "sampler_weights"]
StopReason = Literal["stop", "length"]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


class Refused(Exception):
    """The client's fault: its request fails alone, with this line."""


class ServerFailed(Exception):
    """The server's fault, a rank's death say: every open request fails with this line."""


NAME = re.compile(r"(?!\.)[A-Za-z0-9._:-]{1,128}")
"""A model's or a checkpoint's name, which is a directory's too."""


def check_model_name(name: str) -> None:
    """Raise Refused for what cannot be a model's name, `..` say."""
    if not NAME.fullmatch(name):
        raise Refused(f"model {name!r:.140}: wanted up to 128 letters, digits and ._:-")


@dataclass(frozen=True, slots=True)
class CheckpointPath:
    """`tinker://MODEL/KIND/NAME`, by its parts."""

    model: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The parts of a path. Raises Refused for what is none, `..` say."""
        scheme, _, rest = text.partition("://")
        parts = rest.split("/")
        if scheme == "tinker" and len(parts) == 3 and parts[1] in ("weights", "sampler_weights"):
            model, kind, name = parts
            if NAME.fullmatch(model) and NAME.fullmatch(name):
                return cls(model, cast(Kind, kind), name)
        raise Refused(f"{text!r:.200}: wanted tinker://MODEL/weights/NAME or its sampler_weights")

    def __str__(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence to train on or to score.

    `tokens` [N] are the input; `targets` [N], or [N, K] for several a position: position i predicts
    what follows input i. `inputs` are float32 [N] or [N, K] by name: `weights`, `logprobs`,
    `advantages`.
    """

    tokens: Int32
    targets: Int32
    inputs: dict[str, Float32]


@dataclass(frozen=True, slots=True)
class CreateModel:
    """A new model under the name `model`, or one from the path `source`.

    With `source`, `optimizer` says whether the optimizer's state is loaded as well. Answered by
    `Completed`.
    """

    model: str
    seed: int | None = None
    source: str | None = None
    optimizer: bool = False


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """A loss over `data` and, with `backward`, its gradient added to the model's. `LossOutputs`."""

    model: str
    data: tuple[Datum, ...]
    loss: str
    settings: dict[str, float]
    backward: bool


@dataclass(frozen=True, slots=True)
class OptimStep:
    """One step of AdamW with the gradient so far; `clip` bounds its norm, 0 does not. `Stepped`."""

    model: str
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    clip: float


@dataclass(frozen=True, slots=True)
class Save:
    """The model's weights under a name. Answered by `Saved`.

    `ttl_s`: seconds until its files may go. With `files` False it is a snapshot for sampling that
    lives in memory alone, and its name is the client's number.
    """

    model: str
    name: str
    kind: Kind
    ttl_s: float | None = None
    files: bool = True
    overwrite: bool = False
    """Whether a checkpoint of that name may be replaced; else it is refused."""


@dataclass(frozen=True, slots=True)
class LoadModel:
    """The weights at `path`, and the optimizer's state if asked, into a model. `Completed`."""

    model: str
    path: str
    optimizer: bool


@dataclass(frozen=True, slots=True)
class Unload:
    """The end of a model: its memory is free, its files stay. `Completed`."""

    model: str


@dataclass(frozen=True, slots=True)
class DropSamples:
    """The end of a session, for this `reason`: its samples are not drawn to their end. `Completed`.

    Its requests for samples that are not answered fail with one line.
    """

    session: str
    reason: str


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """How the tokens of a request are drawn.

    `max_tokens` None: up to the context's end. `top_k` 0: all. `eos`: the tokenizer's end of text
    ends a response too.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    eos: bool = True


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """`count` responses to a prompt [N], and log-probabilities of the prompt. `Samples`.

    `weights` is the path of a snapshot; None is the base model. `key` holds the client's own
    numbers, those of its session's sampling client and of its request: the draws' key where
    `settings.seed` is None. `session` asks, and takes its samples with it (`DropSamples`). `count`
    0 scores the prompt alone.

    `topk_prompt_logprobs` and `topk_logprobs` ask for that many of the likeliest tokens at each
    position of the prompt and of the responses. `named` [N - 1, K] holds tokens whose
    log-probabilities at prompt positions 1 to N - 1 are wanted; -1 wants none.
    """

    weights: str | None
    prompt: Int32
    count: int
    settings: SampleSettings
    key: tuple[int, ...]
    session: str
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_logprobs: int = 0
    named: Int32 | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """The end of a checkpoint's files. `Completed`; `Refused` where there is none."""

    path: str


@dataclass(frozen=True, slots=True)
class Expire:
    """The files of a checkpoint may go after `ttl_s` seconds from now; None: never. `Completed`."""

    path: str
    ttl_s: float | None


ClientRequest = (
    CreateModel
    | ForwardBackward
    | OptimStep
    | Save
    | LoadModel
    | Unload
    | SampleRequest
    | DropSamples
    | Delete
    | Expire
)


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """Log-probabilities of each datum's targets, in their shape, and metrics such as `loss:sum`."""

    logprobs: list[Float32]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Stepped:
    """The metrics of an optimizer step."""

    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """Where weights have been saved."""

    path: str


NO_TOKEN = -99999.0
"""The log-probability in a cell of likeliest tokens that has none."""


@dataclass(frozen=True, slots=True)
class LikeliestTokens:
    """The likeliest tokens at each position: ids and log-probabilities, both [N, K].

    A cell that has no token is (0, `NO_TOKEN`), as the whole first row of a prompt is.
    """

    tokens: Int32
    logprobs: Float32


@dataclass(frozen=True, slots=True)
class SampledResponse:
    """One response: tokens and log-probabilities, both [n]; the stop token or text is in it."""

    tokens: Int32
    logprobs: Float32
    stop_reason: StopReason
    topk: LikeliestTokens | None = None


@dataclass(frozen=True, slots=True)
class Samples:
    """The responses to a prompt [N].

    `prompt_logprobs` [N] begins with NaN. `named` has the request's shape, 0 where it has -1.
    """

    sequences: tuple[SampledResponse, ...]
    prompt_logprobs: Float32 | None = None
    topk: LikeliestTokens | None = None
    named: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has files. `created` and `expires` are seconds since 1970."""

    path: str
    rank: int
    bytes: int
    created: float
    expires: float | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """Nothing but that it is done."""


ClientAnswer = LossOutputs | Stepped | Saved | Samples | Completed


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server serves: the base model's name, where its tokenizer is, and its limits.

    `max_tokens` bounds prompt and response together. `lora_rank` 0: all weights are trained.
    `trained` says which weights are: checkpoints of others have other tensors. `sampler_scores`:
    the weights that sample can score, too. Else the training shards score prompts, and there are
    no likeliest tokens. `most_models` is how many models clients may have at once; None: as many as
    they like.
    """

    name: str
    tokenizer_path: str
    max_tokens: int
    lora_rank: int
    vocab: int
    trained: str = "all weights"
    sampler_scores: bool = True
    most_models: int | None = None

    @property
    def lengths(self) -> str:
        """What is wanted of a length, in words, with the keys that set it."""
        keys = "data.max_prompt_tokens plus rollout.max_new_tokens of the server"
        return f"1 to {self.max_tokens} ({keys}, and its model's context)"


class ServeBackend(Protocol):
    """What runs the requests.

    Requests that name a model arrive in the order of the client's numbers. One may arrive before
    the last is answered, so the backend keeps their order. Sample requests are concurrent.

    `failure` becomes the line of what ends it by itself, when that happens: a rank's death, say.
    """

    info: ServedModel
    failure: "Future[str]"

    async def submit(self, request: ClientRequest) -> ClientAnswer:
        """Run a request to its end.

        Raises Refused, ServerFailed, and other errors that concern this request alone.
        """

    def listed(self, model: str | None = None) -> tuple[Checkpoint, ...]:
        """All checkpoints that have files, or those of one model, oldest first; asks no rank."""

    async def close(self) -> None:
        """End what runs, and leave no process."""
