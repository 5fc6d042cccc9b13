"""How responses are generated."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError
from hybridrl.config.layout import RolloutLayoutConfig
from hybridrl.config.model import DType
from hybridrl.config.sampling import SamplingConfig

GRAPH_BUCKETS = 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256
"""The rows of decode steps that are CUDA graphs, unless `rollout.graph_buckets` names others."""
MOST_KEPT = 1024
"""The largest `rollout.top_k` whose ids are recorded (`rollout.sampling_replay`)."""
SPECULATED = 64
"""Tokens that a pass with drafts may have in any case, however few samples run at a time."""


class Engine(Enum):
    """Rollout engines."""

    native = "native"  # of this repository
    vllm = "vllm"  # vLLM, in the worker processes


class SamplingReplay(Enum):
    """Whether training renormalizes over the tokens that truncated sampling has kept."""

    auto = "auto"  # where training's sampling is truncated
    off = "off"


class Push(Enum):
    """What ranks that train send to ranks that generate alone."""

    full = "full"  # the weights
    sparse = "sparse"  # what differs from the version before, where that is smaller


@dataclass(frozen=True, slots=True)
class HostStep:
    """What the host does in a decode step: kernels that it launches, and seconds besides."""

    layer_kernels: float
    """Kernels of a layer."""
    kernels: float
    """Kernels of a step outside of its layers."""
    rest_s: float
    """Seconds of a step that are no launches."""

    def seconds(self, layers: float, launch_s: float) -> float:
        """Seconds of a step of a model with so many layers."""
        return self.rest_s + launch_s * (self.layer_kernels * layers + self.kernels)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFeatures:
    """Abilities of a rollout engine, and its maker: callers ask for these, not for its name."""

    build: str
    """Dotted path of what makes it, a function of `EngineParts`."""
    checks: str = "hybridrl.engines.rollout.available:EngineChecks"
    """Dotted path of its checks before a run starts; this one passes whatever it is asked."""
    host: HostStep
    """The host's part of a decode step, by which plans count its seconds."""
    replay: HostStep | None = None
    """Likewise, of a step that is a CUDA graph: on GPUs, without pipeline stages."""
    exports_kv: bool = False
    """Whether it hands out the keys and values of a sample."""
    keeps_kv: bool = False
    """Whether weights may change under unfinished samples, whose keys and values stay."""
    deterministic: bool = False
    """Whether it can compute every sample alone, so that runs agree bit for bit."""
    shares_weights: bool = False
    """Whether a module has its weights, which others may compute with (`SharesWeights`)."""
    caches_last_token: bool
    """Whether its KV cache needs room for a response's last token."""
    block_multiple: int = 1
    """The number that must divide `rollout.block_size`."""
    vocab_multiple: int = 1
    """Rows of the embedding are padded to a multiple of this."""
    records_experts: bool = False
    """Whether it returns the experts that each token took (`trainer.router_replay`)."""
    records_experts_under_pp: bool = True
    """Whether it does so where an instance has several pipeline stages."""
    takes_share: bool = False
    """Whether it takes all memory that training leaves on a GPU, and divides it itself."""
    wide: str = ""
    """Dotted path of what makes several instances one, which decodes the last samples
    (`rollout.tail_tp`): a `JoinedEngine`; empty where they cannot."""
    speculates: bool = False
    """Whether it verifies guessed tokens by each sample's own random numbers."""
    bounds_calls: bool = False
    """Whether it must know a call's steps: it makes tokens ahead of them (`BoundsCalls`)."""
    dequantizes: bool = False
    """Whether it has the weights of a quantized checkpoint in its own format (`rollout.dtype`)."""
    reads_images: bool = False
    """Whether prompts may have images."""
    ascending: bool = False
    """Whether an instance's ranks must be in ascending order."""


ENGINES = {
    Engine.native: EngineFeatures(
        build="hybridrl.engines.rollout.native:NativeEngine.build",
        # tests/gpu_dry/counts.json: 774 kernels of a decode step of 36 layers, 19 a layer
        host=HostStep(18, 92, 0.0),
        # and for 28 layers on one rank a replay and two copies of what was drawn
        replay=HostStep(0, 3, 0.0),
        exports_kv=True,
        keeps_kv=True,
        deterministic=True,
        shares_weights=True,
        caches_last_token=False,
        records_experts=True,
        speculates=True,
        dequantizes=True,
        reads_images=True,
        bounds_calls=True,
        wide="hybridrl.engines.rollout.wide:WideEngine",
    ),
    Engine.vllm: EngineFeatures(
        build="hybridrl.engines.rollout.vllm.engine:VLLMEngine.build",
        checks="hybridrl.engines.rollout.available:VLLMChecks",
        # CUDA graphs: a replay, and the scheduler's Python, which vLLM reports as 1 to 2 ms
        host=HostStep(0, 0, 1.5e-3),
        keeps_kv=True,
        # Not deterministic: the other samples of a batch change a sample's last bits.
        caches_last_token=True,
        bounds_calls=True,
        takes_share=True,
        ascending=True,
        records_experts=True,
        records_experts_under_pp=False,
        reads_images=True,
        vocab_multiple=64,
        block_multiple=32,  # of its CPU attention; the GPU ones take multiples of 16
    ),
}
"""Every engine: its line here, `conf/rollout/NAME.yaml`, its class."""


@dataclass(kw_only=True, slots=True)
class RolloutConfig(SamplingConfig):
    """The rollout engine of every generation instance, and how training's rollouts are drawn."""

    engine: Engine = Engine.native
    """Which engine; `rollout=native` and `rollout=vllm` set it, and the keys that it needs."""
    dtype: DType = DType.auto
    """Format of the generation weights; `auto`: that of `model.compute_dtype`."""
    max_new_tokens: int = bounded(24, least=1)
    """Longest response, in tokens."""
    temperature: float = bounded(1.0, least=0, allowed="0 (greedy) or above")
    """Softmax temperature of training rollouts; 0 is greedy."""
    sampling_replay: SamplingReplay = SamplingReplay.auto
    """Where `top_k`, `top_p` or `min_p` leave tokens out, `auto` records the ids that were kept, up
    to 1024 a token, and log-probabilities and entropies are renormalized over them. `off`: they are
    those of the whole distribution."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response, besides the end-of-text token. The response keeps them. One that
    is a token of the vocabulary counts as that token alone; any other wherever it appears."""
    skip_special_tokens: bool | None = None
    """Whether the text of a response, which judges, environments and records get, is without the
    tokenizer's special tokens. Null: but for the markers of thoughts and tool calls among them.
    False: but for the ends of a text. It ends without a special token in any case."""
    max_running: int = bounded(256, least=1)
    """Samples that decode at the same time on an instance."""
    block_size: int = bounded(16, least=1)
    """Tokens per block of the paged KV cache."""
    kv_cache_tokens: int = bounded(0, least=0)
    """Tokens that the KV cache of an instance holds; 0 sizes it for `max_running` full samples. A
    GPU may hold fewer; on one, vLLM takes all that is left."""
    kv_host_tokens: int | None = bounded(None, least=0)
    """Tokens of waiting conversations that an instance may have in host memory, where its KV cache
    is short. Null: as many as the cache holds. Others are computed again."""
    decode_steps: int = bounded(64, least=1)
    """Decode steps per bounded call of an instance."""
    push: Push = Push.full
    """What travels to ranks that generate alone (`cluster.pools.rollout`): `full` weights, or
    `sparse`, what has changed since the version before. The weights are the same, bit for bit."""
    layout: RolloutLayoutConfig = field(default_factory=RolloutLayoutConfig)
    """Sharding of the weights in generation."""
    tail_tp: str = "off"
    """Tensor parallelism of the last samples of a step, which several instances decode as one:
    `off`, `auto` (where the step ends sooner, by measured times), or a multiple of `layout.tp`."""
    graph_buckets: list[int] = field(default_factory=lambda: list(GRAPH_BUCKETS))
    """Numbers of rows for which a decode step is a CUDA graph; a batch is filled up to the next
    one, and more rows than the largest take the same step uncaptured. []: no graph steps."""
    speculate: str = "off"
    """Guess tokens ahead, and verify several of a response in a pass: `off`, `auto` (as many as
    pay, by measured times and acceptance), or their number. The tokens stay the same."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """vLLM's own engine arguments (`EngineArgs`), less those that other keys set."""

    def resolve(self) -> None:
        """Bring `speculate` and `tail_tp` into one form."""
        yaml_off = "False"
        if self.speculate == yaml_off:
            self.speculate = "off"
        if self.tail_tp == yaml_off:
            self.tail_tp = "off"

    def check(self) -> None:
        """Raise ConfigError for an empty stop text, or what the engine cannot have."""
        if "" in self.stop:
            raise ConfigError("rollout.stop", self.stop, "texts of one or more characters")
        self.check_sampling("rollout", self.max_new_tokens)
        self._check_sampling_replay()
        self._check_speculation()
        self._check_tail_tp()
        if min(self.graph_buckets, default=1) < 1:
            allowed = "numbers of rows, 1 or more, or [] for no graphs"
            raise ConfigError("rollout.graph_buckets", self.graph_buckets, allowed)
        if self.features.replay is None and tuple(self.graph_buckets) != GRAPH_BUCKETS:
            allowed = f"left out with rollout.engine={self.engine.value}, which has its own graphs"
            raise ConfigError("rollout.graph_buckets", self.graph_buckets, allowed)
        if self.kv_host_tokens is not None and not self.features.exports_kv:
            allowed = f"null with rollout.engine={self.engine.value}"
            raise ConfigError("rollout.kv_host_tokens", self.kv_host_tokens, allowed)
        if self.vllm and self.engine is not Engine.vllm:
            raise ConfigError("rollout.vllm", self.vllm, "none, or rollout=vllm")
        if self.block_size % self.features.block_multiple:
            multiple = self.features.block_multiple
            allowed = f"a multiple of {multiple} with rollout.engine={self.engine.value}"
            raise ConfigError("rollout.block_size", self.block_size, allowed)

    def _check_sampling_replay(self) -> None:
        """Raise ConfigError for truncated sampling whose kept ids cannot be recorded."""
        if not self.replays_sampling:
            return
        using = " and ".join(f"rollout.{setting}" for setting in self.truncating)
        otherwise = "or rollout.sampling_replay=off"
        if not 1 <= self.top_k <= MOST_KEPT:
            allowed = f"1 to {MOST_KEPT} with {using}: a token's kept ids are recorded; {otherwise}"
            raise ConfigError("rollout.top_k", self.top_k, allowed)
        if self.temperature == 0:
            allowed = f"above 0 with {using}: greedy tokens have no distribution; {otherwise}"
            raise ConfigError("rollout.temperature", self.temperature, allowed)

    def _check_speculation(self) -> None:
        """Raise ConfigError for a draft length that is none, or that the engine cannot have."""
        number = self.speculate.isascii() and self.speculate.isdigit() and int(self.speculate)
        if self.speculate not in ("off", "auto") and not 1 <= number <= self.max_new_tokens:
            allowed = f"off, auto, or tokens: 1 to rollout.max_new_tokens={self.max_new_tokens}"
            raise ConfigError("rollout.speculate", self.speculate, allowed)
        if self.draft_length == 0:
            return
        if not self.features.speculates:
            own = "which verifies guesses without a sample's own random numbers"
            allowed = f"off with rollout.engine={self.engine.value}, {own}"
            raise ConfigError("rollout.speculate", self.speculate, allowed)
        if self.layout.pp > 1:
            allowed = f"off with rollout.layout.pp={self.layout.pp}: a row has one token at a time"
            raise ConfigError("rollout.speculate", self.speculate, allowed)

    def _check_tail_tp(self) -> None:
        """Raise ConfigError for a width of the tail that is none, or none of the engine's."""
        if self.tail_tp == "off":
            return
        if not self.features.wide:
            allowed = f"off with rollout.engine={self.engine.value}, whose weights have one layout"
            raise ConfigError("rollout.tail_tp", self.tail_tp, allowed)
        number = int(self.tail_tp) if self.tail_tp.isascii() and self.tail_tp.isdigit() else 0
        tp = self.layout.tp
        if self.tail_tp != "auto" and (number <= tp or number % tp):
            allowed = f"off, auto, or a multiple of rollout.layout.tp={tp}, {2 * tp} or more"
            raise ConfigError("rollout.tail_tp", self.tail_tp, allowed)

    def check_push(self, pool: int, lora_rank: int) -> None:
        """Raise ConfigError for a sparse push of what has no such form, or of no effect.

        `pool` is the number of ranks that generate alone.
        """
        if self.push is Push.full:
            return
        why = ""
        if not pool:
            why = "cluster.pools.rollout=0: no weights are pushed"
        elif lora_rank:
            why = f"actor.lora.rank={lora_rank}: adapters are pushed alone, and all of them change"
        elif self.dtype is not DType.auto and self.dtype.itemsize > 2:
            why = f"rollout.dtype={self.dtype.value}: in more than 16 bits nearly all values change"
        if why:
            raise ConfigError("rollout.push", self.push.value, f"full with {why}")

    def check_tail_ranks(self, ranks: int, ranks_key: str) -> None:
        """Raise ConfigError for a tail that takes more than the `ranks`."""
        pp = self.layout.pp
        if (self.wide_tp or 0) * pp > ranks:
            of_pp = f" over rollout.layout.pp={pp}" if pp > 1 else ""
            allowed = f"off, auto, or at most {ranks // pp}: {ranks_key}={ranks}{of_pp}"
            raise ConfigError("rollout.tail_tp", self.tail_tp, allowed)

    def widths(self, num_instances: int) -> tuple[int, ...]:
        """Numbers of instances that may decode the tail as one, whatever the model allows.

        With `auto` the doublings.
        """
        if self.wide_tp is not None:
            return (self.wide_tp // self.layout.tp,) if self.wide_tp else ()
        return tuple(2**n for n in range(1, num_instances.bit_length()) if 2**n <= num_instances)

    @property
    def replays_sampling(self) -> bool:
        """Whether training renormalizes over the kept ids of the rollouts."""
        return self.sampling_replay is SamplingReplay.auto and bool(self.truncating)

    @property
    def off_policy(self) -> list[str]:
        """The settings that draw from another distribution than the trained one."""
        trained = self.truncating if self.replays_sampling else []
        return [setting for setting in self.differing if setting not in trained]

    @property
    def draft_length(self) -> int | None:
        """Tokens of a draft; 0: nothing is drafted, None: as many as pay."""
        if self.speculate == "off":
            return 0
        return None if self.speculate == "auto" else int(self.speculate)

    @property
    def wide_tp(self) -> int | None:
        """Tensor parallelism of the last samples; 0: the tail stays as it is, None: what pays."""
        if self.tail_tp == "off":
            return 0
        return None if self.tail_tp == "auto" else int(self.tail_tp)

    @property
    def pass_tokens(self) -> int:
        """The most tokens whose successors are drawn in one pass."""
        return self.max_running if self.draft_length == 0 else max(self.max_running, SPECULATED)

    @property
    def features(self) -> EngineFeatures:
        """The abilities of the engine, and its class."""
        return ENGINES[self.engine]
