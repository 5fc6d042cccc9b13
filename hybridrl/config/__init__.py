"""Typed configuration: one dataclass a group, composed by Hydra, checked before anything starts.

Start from `Config` (below: all groups, and the order of their checks), `compose.py` (overrides to
a `Config`, errors to one line) and `bounds.py` (`bounded` fields).
"""

from dataclasses import dataclass, field
from typing import Any

from hybridrl.config.bounds import bounded, check_at_least, check_bounds
from hybridrl.config.cluster import (
    ClusterConfig,
    ClusterKind,
    Device,
    MemoryCheck,
    Placement,
    PoolName,
    PoolOfConfig,
    PoolsConfig,
)
from hybridrl.config.cluster_kinds import (
    CLUSTERS,
    Container,
    EmulatedClusterConfig,
    ProcessesClusterConfig,
    RayClusterConfig,
    SlurmClusterConfig,
)
from hybridrl.config.data import CurriculumConfig, DataConfig, SourceConfig, SourceKind
from hybridrl.config.endpoint import EndpointConfig
from hybridrl.config.environment import (
    EnvironmentConfig,
    EnvironmentKind,
    OnFailure,
)
from hybridrl.config.errors import ConfigError
from hybridrl.config.evaluation import EvalConfig, EvalSetConfig
from hybridrl.config.layout import (
    Grouping,
    PipelineSchedule,
    RolloutLayoutConfig,
    TrainLayoutConfig,
)
from hybridrl.config.lora import ActorConfig, LoraConfig
from hybridrl.config.model import Attention, DType, ModelConfig, TinyModelConfig, Vision
from hybridrl.config.reward import (
    JailKind,
    JailLimits,
    JudgeConfig,
    JudgeHome,
    OnJudgeFailure,
    RewardCall,
    RewardConfig,
    RewardKind,
    RewardPartConfig,
)
from hybridrl.config.rollout import (
    MOST_KEPT,
    SPECULATED,
    Engine,
    Push,
    RolloutConfig,
    SamplingReplay,
)
from hybridrl.config.run import (
    Deterministic,
    KeptSamples,
    LogConfig,
    LoggerName,
    LogLevel,
    RunConfig,
    TelemetryConfig,
)
from hybridrl.config.schedule import (
    SCHEDULES,
    AsyncScheduleConfig,
    Batches,
    EarlyBackward,
    FusedScheduleConfig,
    Migration,
    PackedScheduleConfig,
    ParkedKV,
    PartialScheduleConfig,
    ScheduleConfig,
    ScheduleKind,
    SerialScheduleConfig,
    on_policy_names,
)
from hybridrl.config.serve import ServeConfig
from hybridrl.config.teacher import TeacherConfig
from hybridrl.config.trainer import (
    ActivationMode,
    FuseLayers,
    FuseUpdates,
    LRSchedule,
    OptimConfig,
    OptimName,
    RouterReplay,
    SharePrompts,
    TrainerConfig,
    WarmStartConfig,
)
from hybridrl.config.value_model import VALUE_MODELS, RolesConfig, ValueModelConfig

WARM_START = "hybridrl.recipes.sft:sft"
"""The recipe of the warm start."""


@dataclass(kw_only=True, slots=True)
class Config:
    """All settings of a run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The actor's model."""
    actor: ActorConfig = field(default_factory=ActorConfig)
    """The weights of it that are trained."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts and answers."""
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    """What answers the model's turns, where responses are conversations."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """The judge of responses."""
    cost: RewardConfig = field(default_factory=RewardConfig)
    """The cost of responses, for recipes that have one (Safe-RLHF)."""
    roles: RolesConfig = field(default_factory=RolesConfig)
    """The value models that recipes train, by role."""
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    """The model to distil from."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """The recipe's own settings; `target` is the dotted path of its function."""
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Generation."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Training."""
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    """Supervised phase before the recipe."""
    eval: EvalConfig = field(default_factory=EvalConfig)
    """Held-out evaluation."""
    schedule: ScheduleConfig = field(default_factory=SerialScheduleConfig)
    """When and where each sample's next subtask runs."""
    deterministic: Deterministic = Deterministic.off
    """Whether a sample's numbers may depend on the other samples of its batch."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Ranks, and the nodes that they are on."""
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    """Records."""
    log: LogConfig = field(default_factory=LogConfig)
    """The log."""
    serve: ServeConfig = field(default_factory=ServeConfig)
    """The training API of `hybridrl serve`."""
    run: RunConfig = field(default_factory=RunConfig)
    """Directory and seed."""

    def __post_init__(self) -> None:
        check_bounds(self.trainer, "trainer")  # before the critics, which take over its layout
        check_bounds(self)
        self.rollout.resolve()
        self.environment.resolve(self.rollout.max_new_tokens)
        self.cluster.settle(self)
        self.check_groups()
        self.cluster.resolve()
        if self.cluster.begins_again and not self.trainer.resumes:
            self.trainer.resume = "auto"
        self.check_schedule()
        self.check_experts()
        self.cluster.check_request()
        self.resolve_dtypes()
        self.rollout.check_push(self.cluster.pools.rollout, self.actor.lora.rank)
        if self.cluster.ranks:
            self._resolve_layouts()
            self._check_layouts()

    def check_groups(self) -> None:
        """Raise ConfigError for a group of settings that cannot work, whatever the others are."""
        self.model.check()
        self.reward.check("reward")
        self.cost.check("cost")
        self.environment.check(self.rollout.max_new_tokens)
        self.environment.check_jail(self.reward.jail)
        self._check_environment_rewards()
        self.data.curriculum.check()
        self.teacher.check(self.data.sources)
        self.eval.check(self.rollout.max_new_tokens)
        self.rollout.check()
        self.trainer.check()
        if (key := self.cluster.begins_again) and not self.trainer.keep_last:
            # The checkpoint that it would begin from is deleted as soon as it is written.
            raise ConfigError("trainer.keep_last", 0, f"1 or more, with {key}")
        self.warm_start.optim.check("warm_start.optim")
        self.telemetry.check()

    def _check_environment_rewards(self) -> None:
        """Raise ConfigError for a judge that reads what episodes earn, without an environment."""
        own = ((f"eval.sets.{name}.reward", s.reward) for name, s in self.eval.sets.items())
        judges = [("reward", self.reward), ("cost", self.cost)]
        self.environment.check_rewards([*judges, *((key, judge) for key, judge in own if judge)])

    def resolve_device(self, gpus: int, owner: str) -> None:
        """Fill in `cluster.device`, `cluster.ranks`, and formats and layouts that follow.

        `owner` (this machine, say) has `gpus` GPUs. Raises ConfigError where that does not suffice.
        """
        self.cluster.resolve_device(gpus, owner)
        self.resolve_dtypes()
        self.rollout.check_push(self.cluster.pools.rollout, self.actor.lora.rank)
        self._resolve_layouts()
        self._check_layouts()

    def resolve_dtypes(self) -> None:
        """Fill in the formats of training and generation, once the device is known."""
        if self.cluster.device is not Device.auto:
            self.model.compute_dtype = self.model.compute_dtype.on(self.cluster.device.value)
            if self.rollout.dtype is DType.auto:
                self.rollout.dtype = self.model.compute_dtype

    def _resolve_layouts(self) -> None:
        """Fill in the sizes of pools and axes, once the number of ranks is known."""
        self.cluster.resolve()
        layouts = [("actor", self.trainer.layout)]
        layouts += [(self.pool_of(role), self.value_model_of(role).layout) for role in VALUE_MODELS]
        for pool, layout in layouts:
            if pool in self.cluster.pool_names:
                layout.resolve(self.ranks_of(pool))
                layout.place_experts(self.ranks_of(pool), self.cluster.ranks_per_node)

    def _check_layouts(self) -> None:
        """Raise ConfigError for pools and layouts that do not fit the ranks."""
        self.cluster.check_restarts()
        self.cluster.check_pools()
        self.telemetry.profile.check_ranks(self.cluster.ranks)
        ranks, ranks_key = self.ranks_of("actor"), self.cluster.pool_key("actor")
        self.trainer.layout.check(ranks, ranks_key=ranks_key)
        home = self.cluster.home
        ranks, ranks_key = self.ranks_of(home), self.cluster.pool_key(home)
        self.rollout.layout.check(ranks, ranks_key)
        self.rollout.check_tail_ranks(ranks, ranks_key)
        self.actor.check(self.trainer.layout.tp)
        self._check_trained("trainer.layout", self.trainer.layout, "actor.lora", self.actor.lora)
        for role in VALUE_MODELS:  # of other pools those that the recipe has, once it is known
            if self.pool_of(role) == "actor":
                self.check_value_model(role)

    def check_schedule(self) -> None:
        """Raise ConfigError for a schedule that the rollout engine excludes."""
        self.schedule.check()
        self._check_generating_pool()
        most = self.schedule.max_staleness if isinstance(self.schedule, AsyncScheduleConfig) else 0
        self.environment.check_open_episodes(self.schedule.entry.parks_episodes, most)
        engine, using = self.rollout.features, f"with rollout.engine={self.rollout.engine.value}"
        if self.strict and not engine.deterministic:
            raise ConfigError("deterministic", self.deterministic.value, f"off {using}")
        of_strict = f"off with deterministic={self.deterministic.value}"
        if self.strict and self.rollout.draft_length != 0:
            allowed = f"{of_strict}: passes over several tokens differ in their last bits"
            raise ConfigError("rollout.speculate", self.rollout.speculate, allowed)
        if self.strict and self.trainer.compile:
            allowed = f"false with deterministic={self.deterministic.value}: it fuses sums"
            raise ConfigError("trainer.compile", True, allowed)
        if self.rollout.wide_tp != 0:
            if not self.schedule.entry.migrates_tail:
                tails = " or ".join(k.value for k, e in SCHEDULES.items() if e.migrates_tail)
                allowed = f"off with schedule={self.schedule.kind.value}, or schedule={tails}"
                raise ConfigError("rollout.tail_tp", self.rollout.tail_tp, allowed)
            if self.rollout.wide_tp and self.schedule.fixed_threshold == 0:
                allowed = "null or 1 or more with a number in rollout.tail_tp, which forms there"
                raise ConfigError("schedule.migration_threshold", 0, allowed)
            if self.strict:
                allowed = f"{of_strict}: sums over more ranks differ in their last bits"
                raise ConfigError("rollout.tail_tp", self.rollout.tail_tp, allowed)
        if not engine.exports_kv:
            self.schedule.check_kv_stays(using, keeps_kv=engine.keeps_kv)
        self._check_saved_samples()
        least, most = self.rollout.min_new_tokens, self.rollout.max_new_tokens
        self.schedule.check_lengths(most if self.rollout.ignore_eos else least, most)

    def _check_saved_samples(self) -> None:
        """Raise ConfigError where finished samples are to be saved, and would not be taken."""
        if not self.trainer.save_samples:
            return
        kind, engine = self.schedule.kind, self.rollout.engine
        kinds = ScheduleKind.auto, ScheduleKind.serial, ScheduleKind.fused
        obstacles = {
            "out trainer.save_every or trainer.resume": not self.trainer.saves,
            f" schedule={kind.value}": kind not in kinds,
            f" rollout.engine={engine.value}": engine is not Engine.native,
            f" environment={self.environment.kind.value}": self.environment.is_on,
        }
        for setting, is_there in obstacles.items():
            if is_there:
                raise ConfigError("trainer.save_samples", True, f"false with{setting}")

    def _check_generating_pool(self) -> None:
        """Raise ConfigError for a schedule or layout that ranks which generate alone exclude."""
        size, kind = self.cluster.pools.rollout, self.schedule.kind
        if self.schedule.entry.separate and not size and not self.schedule.follows:
            allowed = f"1 or more ranks that generate with schedule={kind.value}"
            raise ConfigError("cluster.pools.rollout", size, allowed)
        if not size:
            return
        with_pool = f"with cluster.pools.rollout={size}"
        kinds = (ScheduleKind.auto, ScheduleKind.serial)
        if kind not in kinds and not self.schedule.entry.separate:
            allowed = f"serial, periodic, one_step or async {with_pool}"
            raise ConfigError("schedule", kind.value, allowed)
        self.rollout.layout.check_pushed(with_pool)

    def check_experts(self) -> None:
        """Raise ConfigError for settings of experts that the rollout engine or model lacks."""
        replay, engine = self.trainer.router_replay, self.rollout.features
        using, pp = f"rollout.engine={self.rollout.engine.value}", self.rollout.layout.pp
        if replay is RouterReplay.rollout and pp > 1 and not engine.records_experts_under_pp:
            allowed = f"off or trainer with {using} and rollout.layout.pp={pp}"
            raise ConfigError("trainer.router_replay", replay.value, allowed)
        if replay is RouterReplay.rollout and not engine.records_experts:
            allowed = f"off or trainer with {using}"
            raise ConfigError("trainer.router_replay", replay.value, allowed)
        rate = self.trainer.router_bias_update_rate
        if rate and not engine.shares_weights:
            raise ConfigError("trainer.router_bias_update_rate", rate, f"0 with {using}")
        self._check_biases_are_saved("actor.lora", self.actor.lora)
        is_tiny = not (self.model.path or self.model.shape)
        if is_tiny and not self.model.tiny.num_experts:
            for key, value, default in self.trainer.of_experts:
                raise ConfigError(key, value, f"{default} with model.tiny.num_experts=0")

    @property
    def warm_start_steps(self) -> int:
        """Steps of the warm start: a model built on the spot knows nothing that earns a reward."""
        if self.warm_start.steps is not None:
            return self.warm_start.steps
        supervised = self.recipe.get("target") == WARM_START
        return 120 if self.model.path is None and not supervised else 0

    def judge_of(self, role: str) -> JudgeConfig:
        """The settings of a judge, by its role: `reward`, `cost`, `reward.parts.NAME`, ..."""
        whole, _, name = role.partition(".parts.")
        judge = self._whole_judge(whole)
        return judge.parts[name] if name else judge

    def _whole_judge(self, role: str) -> RewardConfig:
        """The settings of `reward`, of `cost`, or of `eval.sets.NAME.reward`."""
        if role.startswith("eval.sets."):
            own = self.eval.sets[role.split(".")[2]].reward
            assert own is not None, role
            return own
        judge: RewardConfig = getattr(self, role)
        return judge

    def is_neural(self, role: str) -> bool:
        """Whether a judge is a model; else it judges in processes."""
        return self.judge_of(role).kind is RewardKind.model

    def home_of(self, role: str) -> JudgeHome:
        """Where a judge works."""
        if self.is_neural(role):
            return JudgeHome.instance if self.pool_of(role) == self.cluster.home else JudgeHome.pool
        return JudgeHome.driver if self.judge_of(role).is_central else JudgeHome.rank

    def judges_of(self, role: str) -> tuple[str, ...]:
        """The roles that judge where a recipe says `reward` or `cost`: that one, or its parts."""
        judge = self._whole_judge(role)
        return tuple(f"{role}.parts.{name}" for name in judge.parts) or (role,)

    @property
    def whole_judges(self) -> dict[str, RewardConfig]:
        """The judges as recipes and evaluation name them, by role: those of parts are none."""
        roles = ("reward", "cost", *map(self.judge_of_set, self.eval.sets))
        return {role: self._whole_judge(role) for role in roles}

    def judge_of_set(self, name: str) -> str:
        """The role that judges an evaluation set: its own, or `reward`."""
        return f"eval.sets.{name}.reward" if self.eval.sets[name].reward else "reward"

    @property
    def eval_judges(self) -> tuple[str, ...]:
        """Every judge of evaluation, which a run has whatever its recipe."""
        roles = ["reward", *map(self.judge_of_set, self.eval.sets)]
        return tuple(dict.fromkeys(judge for role in roles for judge in self.judges_of(role)))

    def sources_of(self, role: str) -> dict[str, SourceConfig]:
        """The sources whose rows a judge sees, by the name that their items have."""
        whole = role.partition(".parts.")[0]
        sets = {n: s for n, s in self.eval.sets.items() if self.judge_of_set(n) == whole}
        trains = not whole.startswith("eval.sets.")
        sources = (
            dict(self.data.sources) if trains or any(not s.source for s in sets.values()) else {}
        )
        return sources | {f"eval.sets.{n}": s.source for n, s in sets.items() if s.source}

    def weight_of(self, role: str) -> float:
        """The weight of the score of one part, `reward.parts.NAME`."""
        judge = self.judge_of(role)
        assert isinstance(judge, RewardPartConfig), role
        return judge.weight

    def value_model_of(self, role: str) -> ValueModelConfig:
        """The settings of a value model, by its role's name."""
        settings: ValueModelConfig = getattr(self.roles, role)
        return settings

    def check_value_model(self, role: str) -> None:
        """Raise ConfigError where a value model does not fit the ranks of its pool."""
        pool = self.pool_of(role)
        ranks, ranks_key = self.ranks_of(pool), self.cluster.pool_key(pool)
        settings, name = self.value_model_of(role), VALUE_MODELS[role]
        settings.check(ranks, name, ranks_key)
        self._check_biases_are_saved(f"{name}.lora", settings.lora)
        self._check_trained(f"{name}.layout", settings.layout, f"{name}.lora", settings.lora)

    def _check_biases_are_saved(self, key: str, lora: LoraConfig) -> None:
        """Raise ConfigError where routing biases move: files of adapters have none."""
        rate = self.trainer.router_bias_update_rate
        if rate and lora.rank:
            raise ConfigError(
                "trainer.router_bias_update_rate", rate, f"0 with {key}.rank={lora.rank}"
            )

    def _check_trained(
        self, layout_key: str, layout: TrainLayoutConfig, lora_key: str, lora: LoraConfig
    ) -> None:
        """Raise ConfigError for settings of training that a model's layout or adapters exclude."""
        mode, chunk = self.trainer.activations, self.trainer.chunk_tokens
        zero_bubble = f"{layout_key}.schedule=zero_bubble"
        # Torch would recompute a layer for each group of its weights, and keep all of that until
        # the backward pass ends: more than `keep` has.
        if mode.recomputes and layout.splits_backward:
            allowed = f"auto, keep or offload with {zero_bubble}"
            raise ConfigError("trainer.activations", mode.value, allowed)
        if chunk and layout.splits_backward:
            raise ConfigError("trainer.chunk_tokens", chunk, f"0 with {zero_bubble}")
        if chunk and lora.rank and lora.dropout:  # a chunk's second pass would drop other inputs
            allowed = f"0 with {lora_key}.dropout={lora.dropout}"
            raise ConfigError("trainer.chunk_tokens", chunk, allowed)
        obstacles = {
            zero_bubble: layout.splits_backward,  # backward is one call
            f"{layout_key}.tp={layout.tp}": layout.tp > 1,  # tracing its hooks does not end
            f"{lora_key}.rank={lora.rank}": lora.rank > 0,
        }
        for setting, is_there in obstacles.items():
            if self.trainer.compile and is_there:
                raise ConfigError("trainer.compile", True, f"false with {setting}")

    def ranks_of(self, pool: str) -> int:
        """The number of ranks of a pool."""
        return len(self.cluster.pool_ranks[pool])

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest prompt with the longest response that is trained."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def longest_response(self) -> int:
        """Tokens of the longest response that is generated, in evaluation too."""
        own = (settings.max_new_tokens or 0 for settings in self.eval.sets.values())
        return max([self.rollout.max_new_tokens, *own])

    @property
    def stop_texts(self) -> list[str]:
        """Texts and tokens that end a response, or a turn of a conversation."""
        return [*self.rollout.stop, *self.environment.stop]

    @property
    def longest_generated(self) -> int:
        """Tokens of the longest prompt with the longest response that is generated."""
        return self.data.max_prompt_tokens + self.longest_response

    @property
    def samples_held(self) -> int:
        """Samples that decode together on an instance, of whatever length: KV cache and batch.

        At least one: that one fits is checked for the prompts that there are, not for the longest.
        """
        rollout = self.rollout
        blocks = -(-self.longest_generated // rollout.block_size)
        cached = max(1, -(-rollout.kv_cache_tokens // rollout.block_size) // blocks)
        return min(rollout.max_running, cached) if rollout.kv_cache_tokens else rollout.max_running

    def pool_field(self, role: str) -> str:
        """The field of `cluster.pool_of` that a role follows: a copy of the actor `reference`.

        A part of a judge and a judge of an evaluation set follow the whole one.
        """
        whole = role.partition(".parts.")[0]
        whole = "reward" if whole.startswith("eval.sets.") else whole
        return whole if hasattr(self.cluster.pool_of, whole) else "reference"

    def pool_of(self, role: str) -> str:
        """The pool of a role that is a model, by name."""
        return "actor" if role == "actor" else self.cluster.pool_of_role(self.pool_field(role))

    @property
    def strict(self) -> bool:
        """Whether every sample is computed alone, so that runs agree bit for bit."""
        return self.deterministic is Deterministic.strict

    @property
    def records_digests(self) -> bool:
        """Whether digests of each step are recorded."""
        return self.strict if self.telemetry.digests is None else self.telemetry.digests


__all__ = [
    "CLUSTERS",
    "MOST_KEPT",
    "SPECULATED",
    "VALUE_MODELS",
    "ActivationMode",
    "ActorConfig",
    "AsyncScheduleConfig",
    "Attention",
    "Batches",
    "ClusterConfig",
    "ClusterKind",
    "Config",
    "ConfigError",
    "Container",
    "CurriculumConfig",
    "DType",
    "DataConfig",
    "Deterministic",
    "Device",
    "EarlyBackward",
    "EmulatedClusterConfig",
    "EndpointConfig",
    "Engine",
    "EnvironmentConfig",
    "EnvironmentKind",
    "EvalConfig",
    "EvalSetConfig",
    "FuseLayers",
    "FuseUpdates",
    "FusedScheduleConfig",
    "Grouping",
    "JailKind",
    "JailLimits",
    "JudgeConfig",
    "JudgeHome",
    "KeptSamples",
    "LRSchedule",
    "LogConfig",
    "LogLevel",
    "LoggerName",
    "LoraConfig",
    "MemoryCheck",
    "Migration",
    "ModelConfig",
    "OnFailure",
    "OnJudgeFailure",
    "OptimConfig",
    "OptimName",
    "PackedScheduleConfig",
    "ParkedKV",
    "PartialScheduleConfig",
    "PipelineSchedule",
    "Placement",
    "PoolName",
    "PoolOfConfig",
    "PoolsConfig",
    "ProcessesClusterConfig",
    "Push",
    "RayClusterConfig",
    "RewardCall",
    "RewardConfig",
    "RewardKind",
    "RewardPartConfig",
    "RolesConfig",
    "RolloutConfig",
    "RolloutLayoutConfig",
    "RouterReplay",
    "RunConfig",
    "SamplingReplay",
    "ScheduleConfig",
    "ScheduleKind",
    "SerialScheduleConfig",
    "ServeConfig",
    "SharePrompts",
    "SlurmClusterConfig",
    "SourceConfig",
    "SourceKind",
    "TeacherConfig",
    "TelemetryConfig",
    "TinyModelConfig",
    "TrainLayoutConfig",
    "TrainerConfig",
    "ValueModelConfig",
    "Vision",
    "WarmStartConfig",
    "bounded",
    "check_at_least",
    "on_policy_names",
]
