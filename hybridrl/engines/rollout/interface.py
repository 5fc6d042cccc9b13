"""The interface of rollout engines. An engine is local to a generation instance."""

import pkgutil
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.config import RolloutConfig, RouterReplay
from hybridrl.engines.rollout.expert_record import ExpertRecord
from hybridrl.engines.rollout.kept_ids import KeptIds
from hybridrl.engines.rollout.stops import StopStrings
from hybridrl.layout.layerwise import Fill
from hybridrl.layout.layout import Layout
from hybridrl.layout.parameters import Parameter
from hybridrl.models.image_files import Images
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.models.shard import GenParallel


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters: `temperature` 0 is greedy; the defaults are all tokens.

    They are vLLM's, but for `logit_bias` (pairs of token id and bias) and `bad_words` (token ids of
    each word). Before `min_new_tokens`, tokens of `stop_token_ids` and of `ignored_stop_ids` are
    not drawn; the latter end no response.

    With `keeps_ids` the ids that each token was drawn from are recorded, which are `top_k` at most.
    Log-probabilities are then those of the distribution renormalized over them.

    With `max_turn_tokens` the response is a conversation. What ends a response ends a turn of it,
    and so do that many tokens. 0: the response is one turn.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    ignored_stop_ids: tuple[int, ...] = ()
    max_turn_tokens: int = 0
    keeps_ids: bool = False

    @property
    def has_penalty(self) -> bool:
        """Whether logits depend on the tokens so far, by their number."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0)

    @property
    def edits_logits(self) -> bool:
        """Whether tokens are drawn from other logits than the model's."""
        return bool(self.has_penalty or self.min_new_tokens or self.logit_bias or self.bad_words)


@dataclass(frozen=True, slots=True, eq=False)
class KV:
    """One rank's KV cache of a request that does not run, in host memory.

    `blocks` [layers, 2, kv_heads, tokens, head_dim]: keys and values of the rank's own layers and
    heads, contiguous. They are of all tokens of prompt and response but the pending last one.
    Of a conversation a reply may be missing, too, that was not computed yet. `states` [bytes] are
    the rank's recurrent states behind the same tokens, where the model has such layers
    (`StateCache.read`). Both
    pickle as numpy arrays, so that an object store needs no copy. Such a tensor may be in
    read-only memory: do not write to it.
    """

    blocks: torch.Tensor
    states: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values these are."""
        return self.blocks.shape[3]

    @property
    def nbytes(self) -> int:
        """Bytes of states, and layers * 2 * kv_heads * tokens * head_dim * itemsize of the rest."""
        return self.blocks.nbytes + (0 if self.states is None else self.states.nbytes)

    def __reduce__(self) -> tuple[Callable[..., "KV"], tuple[Any, ...]]:
        # As bytes: numpy has no bfloat16.
        states = None if self.states is None else self.states.numpy()
        return _unpickle_kv, (self.blocks.view(torch.uint8).numpy(), self.blocks.dtype, states)


def _unpickle_kv(
    array: npt.NDArray[np.uint8], dtype: torch.dtype, states: npt.NDArray[np.uint8] | None
) -> KV:
    with warnings.catch_warnings():
        # An object store returns read-only memory, and nothing writes to it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        kept = None if states is None else torch.from_numpy(states)
        return KV(torch.from_numpy(array).view(dtype), kept)


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn that has ended: response tokens [`start`, `stop`).

    `finish` is `stop` or `length`. The tokens up to the next turn are the reply to it.
    """

    start: int
    stop: int
    finish: str


@dataclass(slots=True)
class Request:
    """One response to generate.

    `stream` is the sample's 64-bit random key: token number i draws its uniform from (stream, i),
    so batch, order and rank change nothing. `prefix` names a prompt whose KV blocks requests with
    the same `prefix` share. `task` is the prompt's, by which it is learned how well tokens are
    guessed. `response_ids` and `log_probs` hold the tokens generated before a park. `siblings` are
    the other responses to the prompt that the engine knew, by which the next one guesses.

    `kv` is the cache that `park(..., with_kv=True)` copied. `submit` then restores it instead of
    computing it, whichever weights computed it; each rank of an instance passes its own shard.

    `routed_experts` has the experts of the tokens that were computed, where the engine records them
    (`EngineFeatures.records_experts`). It then fills them in, and computes those tokens again with
    the experts that they had.

    `kept_ids` has the ids that each response token was drawn from, where `sampling.keeps_ids`.

    `images` are the files of the prompt's images, whose pads are among the `prompt_ids`.

    `stops` are texts that end it, besides those of the engine.

    With `rests_at` it is held once it has so many response tokens and has not ended, until it is
    parked. 0: never.

    `recomputed_at` has the response tokens that it had whenever all its keys and values were
    computed again: after a park without them, or where the cache had no room.

    A conversation has `turns` that have ended, and the turn in progress begins at `turn_start`.
    Replies are tokens of the response, with log-probabilities of 0.
    """

    id: object
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stream: int
    prefix: object = None
    task: str = ""
    response_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    siblings: dict[object, list[int]] = field(default_factory=dict)
    kv: KV | None = None
    routed_experts: ExpertRecord | None = None
    kept_ids: KeptIds | None = None
    turns: list[Turn] = field(default_factory=list)
    turn_start: int = 0
    rests_at: int = 0
    recomputed_at: list[int] = field(default_factory=list)
    images: Images = ()
    stops: StopStrings | None = None

    def copy(self) -> "Request":
        """One with lists of its own, and without keys and values."""
        return replace(
            self,
            response_ids=list(self.response_ids),
            log_probs=list(self.log_probs),
            kv=None,
            routed_experts=None if self.routed_experts is None else self.routed_experts.copy(),
            kept_ids=self.own_kept_ids(),
            turns=list(self.turns),
            recomputed_at=list(self.recomputed_at),
        )

    def own_kept_ids(self) -> KeptIds | None:
        """A record of kept ids that may grow by itself; None where none are kept."""
        if not self.sampling.keeps_ids:
            return None
        return KeptIds() if self.kept_ids is None else self.kept_ids.copy()

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def is_held(self) -> bool:
        """Whether its turn has ended and no reply has come."""
        return bool(self.turns) and self.turns[-1].start == self.turn_start


@dataclass(frozen=True, slots=True)
class Output:
    """A finished response; `finish` is `stop` or `length`.

    After `stop` the last token is the stop token, or completes a stop text.

    `log_probs[i]` is that of `token_ids[i]` under the sampling distribution: after temperature,
    before all that restricts it, or renormalized over the kept ids. `routed_experts` are those of
    prompt and response but the last token, which was never computed, where the engine records them.
    `kept_ids` are those that each token was drawn from, where they are kept. `turns` are a
    conversation's. `recomputed_at` is that of the request.
    """

    id: object
    token_ids: list[int]
    log_probs: list[float]
    finish: str
    routed_experts: ExpertRecord | None = None
    turns: tuple[Turn, ...] = ()
    kept_ids: KeptIds | None = None
    recomputed_at: tuple[int, ...] = field(default=(), compare=False)


REST = "rest"
"""The finish of a `HeldTurn` whose request rests (`Request.rests_at`)."""


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """The turn of a conversation has ended with `token_ids`: it is held until `answer`.

    `finish` is `stop` or `length`; `response_tokens` are those of all turns and replies so far.
    With `rests` it ended where its request rests, or the request rests there amid a turn (`REST`).
    """

    id: object
    token_ids: list[int]
    finish: str
    response_tokens: int
    rests: bool = False


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters since the engine was created, and its present load.

    `running` counts finished requests that no step has returned yet, `held` those whose turn has
    ended. For a cost model:
    `decode_tokens` are the tokens that were fed (rows and drafts summed over `decode_steps`),
    `cached_tokens` those that rows attended to, summed likewise. `drafted_tokens` were guessed, of
    which `accepted_tokens` were drawn; `refused_drafts` had one that was not. `prefill_tokens` were
    computed in `prefill_calls` forward passes, `replayed_tokens` by decode passes without sampling
    (deterministic engines only), `restored_tokens` were copied from a `Request.kv`;
    `kv_bytes_per_token` is this rank's, and so is `state_bytes`, of a sequence's recurrent states.
    `has_cache` is False from `sleep` until work.
    Of the tokens that held requests had cached when they continued, `kept_tokens` still were.
    `recomputed_tokens` had given way to others, or filled no block of vLLM's. `moved_tokens` gave
    way to host memory. `graph_steps` decode steps were those of a fixed sequence of kernels
    (`graph_decode.py`), of which `graph_captures` CUDA graphs were captured.
    """

    running: int
    waiting: int
    kv_blocks_free: int
    kv_blocks_total: int
    kv_bytes_per_token: int
    has_cache: bool
    decode_steps: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    prefill_calls: int = 0
    prefill_tokens: int = 0
    replayed_tokens: int = 0
    restored_tokens: int = 0
    shared_prompt_tokens: int = 0
    num_preempted: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    refused_drafts: int = 0
    held: int = 0
    kept_tokens: int = 0
    moved_tokens: int = 0
    recomputed_tokens: int = 0
    graph_steps: int = 0
    graph_captures: int = 0
    state_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineParts:
    """The arguments of every engine, of which each takes what it needs.

    The engine runs the model in the directory `model_path`, of the Hugging Face config
    `model_config`. `layout` says which weights this rank holds, as a share of an instance of its
    mesh; `parallel` are its coordinates. A sequence has at most `max_sequence` tokens.
    `router_replay` says whether the engine records experts, or others do in its module. On a GPU
    others will take `reserved_bytes` while it generates, of which nothing is in use yet.
    """

    rollout: RolloutConfig
    model_path: str
    model_config: PretrainedConfig
    layout: Layout
    parallel: GenParallel
    device: torch.device
    stops: StopStrings | None
    max_sequence: int
    deterministic: bool
    router_replay: RouterReplay = RouterReplay.off
    reserved_bytes: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Format of the generation weights."""
        return TORCH_DTYPES[self.rollout.dtype]

    @property
    def bucket_bytes(self) -> int:
        """Size of a bucket of the weight switch, of which two are in memory."""
        return self.rollout.layout.bucket_bytes(self.device.type)


class RolloutEngine(Protocol):
    """Continuous batching over a paged KV cache: these eleven members are what a new engine writes.

    `build_engine` makes one: awake, with random weights. Asleep it has no weights and no cache;
    `load` wakes it. A ready engine may free its cache alone, and allocates a new one when there is
    work. Weights may be loaded only while nothing runs, or with `keeps_kv`.

    What some engines can do beyond this is a line of `EngineFeatures`, and a protocol below.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, first come first served; a parked request continues from its last token.

        From its `kv`, if it has one, else its tokens are recomputed.
        """
        ...

    def step(self) -> list[Output]:
        """One decode step for all running requests (admitting and prefilling waiting ones).

        Returns the finished ones; under pipeline parallelism, those of the previous step.
        """
        ...

    def take_turns(self) -> list[HeldTurn]:
        """The turns that have ended since the last call; their requests are held.

        A held request has no row of the batch, and keeps its KV cache while there is room. One that
        rests (`Request.rests_at`) comes with the finish `REST`: its turn has not ended.
        """
        ...

    def answer(
        self, id: object, tokens: Sequence[int] | None, finish: str = "stop"
    ) -> Output | None:
        """Continue a held request behind the `tokens` of a reply, which may be none.

        New tokens alone are computed. None: the response is complete; its output, of that `finish`,
        is returned. Raises ValueError for a request that is not held, and for tokens that leave no
        room for one that is drawn.
        """
        ...

    def park(self, ids: Iterable[object], with_kv: bool = False) -> list[Request]:
        """Remove unfinished requests, with their tokens so far; `submit` resumes them.

        `with_kv`, where `EngineFeatures.exports_kv`, fills `Request.kv` of those with a cache; a
        waiting one keeps its `kv`. A held one is held again where it is submitted.
        """
        ...

    def copy(self) -> list[Request]:
        """Copies of all unfinished requests, which go on: as `park` gives them, without a cache."""
        ...

    def load(self, fill: Fill, keeps_kv: bool = False) -> None:
        """Take other weights: let `fill` write this rank's shards, all at once or layer by layer.

        An engine that sleeps wakes. Cached prompts are dropped: the old weights computed them. With
        `keeps_kv`, where `EngineFeatures.keeps_kv`, requests may run or be held. They go on, on
        the keys and values that they have.
        """
        ...

    def sleep(self, keep_weights: bool = False) -> None:
        """Free weights and KV cache, or the cache alone. Waiting requests stay.

        An instance may sleep while others decode, for early backward: nothing here is collective
        but among its own ranks. Nothing may run. With `keep_weights` requests may be held, and work
        allocates the cache again.
        """
        ...

    @property
    def unfinished(self) -> int:
        """Requests that run or wait, and finished ones that no step has returned; not held ones."""
        ...

    def stats(self) -> Stats:
        """Counters and load."""
        ...

    def close(self) -> None:
        """Release processes and groups that the engine started."""
        ...


class SharesWeights(Protocol):
    """What an engine of `EngineFeatures.shares_weights` has besides."""

    @property
    def model(self) -> PreTrainedModel:
        """The module with the weights, which others may compute with."""
        ...


class BoundsCalls(Protocol):
    """What an engine of `EngineFeatures.bounds_calls` has besides."""

    def begin_call(self, limit: int | None) -> None:
        """Until the next call no request makes more than `limit` tokens, whatever a step makes.

        None: no limit. The requests that finish are those that finish at a token a step.
        """
        ...

    @property
    def call_is_done(self) -> bool:
        """Whether every request has made the tokens that the call may add: no step makes more."""
        ...


class JoinedEngine(RolloutEngine, Protocol):
    """A rank of several instances that decode as one, made by what `EngineFeatures.wide` names."""

    @property
    def joined(self) -> bool:
        """Whether the engine has weights and a cache."""
        ...

    def join(self) -> None:
        """Take the rank's own engine's weights and cache, which runs nothing meanwhile."""
        ...

    def leave(self) -> None:
        """Let go of weights and cache; nothing may run."""
        ...


def build_engine(parts: EngineParts) -> RolloutEngine:
    """The configured engine at this rank's position of the generation mesh. Collective.

    Training's weights must have left the device, unless they stay there.
    """
    build: Callable[[EngineParts], RolloutEngine]
    build = pkgutil.resolve_name(parts.rollout.features.build)
    return build(parts)


def join_engine(
    rollout: RolloutConfig,
    own: RolloutEngine,
    parameters: Mapping[str, Parameter],
    parallel: GenParallel,
) -> JoinedEngine:
    """An engine on the weights of a rank's `own`, at another place: it has not joined yet.

    `parameters` are the model's by name.
    """
    build: Callable[[RolloutEngine, Mapping[str, Parameter], GenParallel], JoinedEngine]
    build = pkgutil.resolve_name(rollout.features.wide)
    return build(own, parameters, parallel)
