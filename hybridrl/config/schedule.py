"""When and where each sample's next subtask runs: a dataclass and an entry for each schedule."""

from dataclasses import dataclass
from enum import Enum

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError

_ALL_LENGTHS = "the lengths of all responses"


class ScheduleKind(Enum):
    """When and where each sample's next subtask runs."""

    auto = "auto"  # serial or fused: what acts in the run
    serial = "serial"  # every stage waits for the whole batch
    fused = "fused"  # per-sample stages start as samples finish; the long tail is gathered
    partial = "partial"  # more prompts than a step needs; unfinished samples continue in the next
    packed = "packed"  # the prompts of several steps, so that long responses share steps
    asynchronous = "async"  # ranks that generate are ahead of those that train


class Migration(Enum):
    """The state that travels with a sample to another instance."""

    auto = "auto"  # whichever is measured to cost less
    kv = "kv"  # its keys and values
    recompute = "recompute"  # its tokens, from which the rest is computed again


class EarlyBackward(Enum):
    """Whether training may begin on groups that are whole, while others are generated."""

    never = "never"  # all ranks train when all samples are there
    auto = "auto"  # where recipe and layout allow it, on instances that have nothing else to do


class ParkedKV(Enum):
    """The fate of the keys and values of a parked sample when the weights change."""

    recompute = "recompute"  # computed again under the new weights
    keep = "keep"  # used as they are


class NewWeights(Enum):
    """When an instance takes weights that come while it decodes."""

    when_free = "when_free"  # once it has no unfinished sample of an earlier batch
    in_flight = "in_flight"  # at its next call, under its unfinished samples


class Batches(Enum):
    """Which groups a step trains that older weights may have made."""

    in_order = "in_order"  # those of the next prompts
    as_complete = "as_complete"  # those that are complete first


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """Settings of every schedule; `schedule=NAME` chooses one."""

    kind: ScheduleKind
    """Which schedule; choose it by `schedule=NAME`, which brings its settings along."""

    @property
    def entry(self) -> "ScheduleEntry":
        """The properties of this schedule."""
        return entry_of(self.kind)

    def check(self) -> None:
        """Raise ConfigError for settings of another schedule, or that do not fit each other."""
        if type(self) is not self.entry.settings:
            name = self.kind.value
            raise ConfigError("schedule.kind", name, f"schedule={name} in its place")

    def check_kv_stays(self, using: str, *, keeps_kv: bool) -> None:
        """Raise ConfigError for a setting that needs an engine which hands out keys and values.

        `using` says which engine does not. With `keeps_kv` they may stay in it under new weights.
        """

    def check_lengths(self, least: int, most: int, of: str = _ALL_LENGTHS) -> None:
        """Raise ConfigError for a limit in tokens that responses of `least` to `most` never meet.

        Or never pass: then it has no effect. The error says whose lengths these are.
        """

    @property
    def may_be_stale(self) -> bool:
        """Whether it may train on samples that older weights made."""
        return self.entry.may_be_stale

    @property
    def serial_batches(self) -> bool:
        """Whether a step trains on the batch that it has under `serial`."""
        return self.entry.serial_batches

    @property
    def keeps_kv(self) -> bool:
        """Whether keys and values of unfinished samples stay when weights have changed."""
        return False

    @property
    def follows(self) -> bool:
        """Whether tokens are made by the weights that an earlier run's record names."""
        return False

    @property
    def fixed_threshold(self) -> int | None:
        """The migration threshold, where there is one and it is set."""
        return None

    @property
    def trains_early(self) -> bool:
        """Whether training may begin while samples are generated."""
        return False

    @property
    def in_progress(self) -> float:
        """So many times the prompts that a step trains on are generated at a time."""
        return 1.0


@dataclass(kw_only=True, slots=True)
class AutoScheduleConfig(ScheduleConfig):
    """`fused` with what acts in the run, or `serial`; nothing to set.

    It is replaced before the start of a run (`preflight/schedule_choice.py`).
    """

    kind: ScheduleKind = ScheduleKind.auto
    """This schedule."""

    def check(self) -> None:
        """Raise ConfigError where another schedule is asked for by its kind."""
        if self.kind is not ScheduleKind.auto:
            name = self.kind.value
            raise ConfigError("schedule.kind", name, f"schedule={name} in its place")


@dataclass(kw_only=True, slots=True)
class SerialScheduleConfig(ScheduleConfig):
    """Every stage waits for the whole batch; nothing to set."""

    kind: ScheduleKind = ScheduleKind.serial
    """This schedule."""


@dataclass(kw_only=True, slots=True)
class FusedScheduleConfig(ScheduleConfig):
    """The batch of the serial schedule, sooner."""

    kind: ScheduleKind = ScheduleKind.fused
    """This schedule."""
    migration_threshold: int | None = bounded(None, least=0)
    """At so few unfinished samples they are gathered on few instances. 0 is never; null finds the
    best number by a model of the step, from earlier lengths and measured costs."""
    migration: Migration = Migration.auto
    """The state that travels with a sample that is moved."""
    early_backward: EarlyBackward = EarlyBackward.never
    """Whether an instance without samples may train on groups that are whole, before the others
    are. It needs instances of whole training replicas (`trainer.layout.replicas`)."""

    def check_kv_stays(self, using: str, *, keeps_kv: bool) -> None:
        """Raise ConfigError where a sample is to travel with its keys and values."""
        if self.migration is Migration.kv:
            raise ConfigError("schedule.migration", "kv", f"auto or recompute {using}")

    @property
    def fixed_threshold(self) -> int | None:
        """The migration threshold, where it is set."""
        return self.migration_threshold

    @property
    def trains_early(self) -> bool:
        """Whether training may begin while samples are generated."""
        return self.early_backward is EarlyBackward.auto


@dataclass(kw_only=True, slots=True)
class StaleScheduleConfig(ScheduleConfig):
    """Schedules under whose unfinished samples weights may change."""

    parked_kv: ParkedKV = ParkedKV.recompute
    """The KV cache of unfinished samples, once the weights have changed."""

    def check_kv_stays(self, using: str, *, keeps_kv: bool) -> None:
        """Raise ConfigError where parked samples are to keep their keys and values."""
        if self.keeps_kv:
            raise ConfigError("schedule.parked_kv", "keep", f"recompute {using}")

    @property
    def keeps_kv(self) -> bool:
        """Whether keys and values of unfinished samples stay when weights have changed."""
        return self.parked_kv is ParkedKV.keep


@dataclass(kw_only=True, slots=True)
class PartialScheduleConfig(StaleScheduleConfig):
    """More prompts than a step needs; unfinished samples continue in the next."""

    kind: ScheduleKind = ScheduleKind.partial
    """This schedule."""
    over_provision: float = bounded(1.5, least=1)
    """So many times the prompts that a step trains on are in progress."""
    max_staleness: int = bounded(1, least=1)
    """The most steps between a sample's first token and its training."""

    @property
    def in_progress(self) -> float:
        """So many times the prompts that a step trains on are generated at a time."""
        return self.over_provision

    def check(self) -> None:
        """Raise ConfigError for more prompts in progress than `max_staleness` leaves steps for."""
        ScheduleConfig.check(self)
        if self.over_provision > 1 + self.max_staleness:
            allowed = f"1 to 1 + schedule.max_staleness, which is {1 + self.max_staleness}"
            raise ConfigError("schedule.over_provision", self.over_provision, allowed)


@dataclass(kw_only=True, slots=True)
class PackedScheduleConfig(ScheduleConfig):
    """The prompts of several steps in another order, so that long responses share steps."""

    kind: ScheduleKind = ScheduleKind.packed
    """This schedule."""
    max_wait_steps: int = bounded(3, least=1)
    """The most steps that a prompt waits. The prompts of one step more are ordered together."""
    limit_tokens: int | None = bounded(None, least=1)
    """A prompt whose response is longer is put off. Null takes the length that the share
    `max_wait_steps` / (`max_wait_steps` + 1) of the last prompts have kept to, and a margin."""

    def check_lengths(self, least: int, most: int, of: str = _ALL_LENGTHS) -> None:
        """Raise ConfigError for a limit that no response keeps to, or every one."""
        limit = self.limit_tokens
        if limit is None or least < limit < most:
            return
        allowed = f"null, or above {least} and below {most}, {of}"
        if least + 1 >= most:
            allowed = f"null: every response has {most} tokens"
        raise ConfigError("schedule.limit_tokens", limit, allowed)


@dataclass(kw_only=True, slots=True)
class AsyncScheduleConfig(StaleScheduleConfig):
    """Ranks that generate (`cluster.pools.rollout`) are ahead of those that train."""

    kind: ScheduleKind = ScheduleKind.asynchronous
    """This schedule."""
    max_staleness: int = bounded(1, least=0)
    """Step k trains tokens of the weights after k - max_staleness steps; 0 is on-policy."""
    new_weights: NewWeights = NewWeights.when_free
    """When an instance takes new weights; in flight, step k trains newer tokens, too."""
    batches: Batches = Batches.in_order
    """Which groups a step trains; as complete, step k trains newer tokens, too."""
    follow: str | None = None
    """The directory of a run, whose tokens are made again by the weights that its record names."""

    @property
    def follows(self) -> bool:
        """Whether tokens are made by the weights that an earlier run's record names."""
        return self.follow is not None

    @property
    def in_flight(self) -> bool:
        """Whether weights change under unfinished samples."""
        return self.new_weights is NewWeights.in_flight

    @property
    def depends_on_time(self) -> bool:
        """Whether time decides which weights make a token, or which groups a step trains."""
        return self.in_flight or self.batches is Batches.as_complete

    def check(self) -> None:
        """Raise ConfigError for weights that never change in flight, and caches that none meets.

        Also where no group may be complete before another one's step.
        """
        ScheduleConfig.check(self)
        if self.batches is Batches.as_complete and not self.max_staleness:
            allowed = "in_order with schedule.max_staleness=0"
            raise ConfigError("schedule.batches", "as_complete", allowed)
        if self.in_flight and not self.max_staleness:
            allowed = "when_free with schedule.max_staleness=0"
            raise ConfigError("schedule.new_weights", "in_flight", allowed)
        if not self.in_flight and self.parked_kv is ParkedKV.keep:
            allowed = "recompute with schedule.new_weights=when_free"
            raise ConfigError("schedule.parked_kv", "keep", allowed)

    def check_kv_stays(self, using: str, *, keeps_kv: bool) -> None:
        """Raise ConfigError where keys and values are to stay, and the engine cannot keep them.

        Or where a followed sample, which rests and is parked, is to keep them.
        """
        if not keeps_kv:
            StaleScheduleConfig.check_kv_stays(self, using, keeps_kv=keeps_kv)
        if self.keeps_kv and self.follow is not None:
            allowed = f"null or schedule.parked_kv=recompute {using}"
            raise ConfigError("schedule.follow", self.follow, allowed)

    @property
    def may_be_stale(self) -> bool:
        """Whether it trains on samples that older weights made."""
        return self.max_staleness > 0

    @property
    def serial_batches(self) -> bool:
        """Whether a step trains on the batch that it has under `serial`."""
        return self.max_staleness == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleEntry:
    """Properties of a schedule: callers ask for these, not for its name."""

    settings: type[ScheduleConfig]
    """The dataclass of `schedule.*`."""
    overlaps: bool = True
    """Whether a stage may begin while samples are missing that another one makes."""
    moves_samples: bool = False
    """Whether a sample may change instance before the step's last one is finished."""
    migrates_tail: bool = False
    """Whether the last samples are gathered on few instances, at a threshold."""
    may_be_stale: bool = False
    """Whether it may train on samples that older weights made."""
    serial_batches: bool = True
    """Whether a step trains on the batch that it has under `serial`."""
    parks_episodes: bool = False
    """Whether a round may end amid an episode, which a later step continues."""
    separate: bool = False
    """Whether instances have ranks of their own (`cluster.pools.rollout`), and go on meanwhile."""
    counts_tokens: bool = False
    """Whether its batches follow from what instances finish in calls of so many tokens a sample."""


SCHEDULES = {
    ScheduleKind.serial: ScheduleEntry(
        settings=SerialScheduleConfig,
        overlaps=False,
    ),
    ScheduleKind.fused: ScheduleEntry(
        settings=FusedScheduleConfig,
        moves_samples=True,
        migrates_tail=True,
    ),
    ScheduleKind.partial: ScheduleEntry(
        settings=PartialScheduleConfig,
        moves_samples=True,
        may_be_stale=True,
        parks_episodes=True,
        serial_batches=False,
        counts_tokens=True,
    ),
    ScheduleKind.packed: ScheduleEntry(
        settings=PackedScheduleConfig,
        moves_samples=True,
        serial_batches=False,
        counts_tokens=True,
    ),
    ScheduleKind.asynchronous: ScheduleEntry(
        settings=AsyncScheduleConfig,
        separate=True,
        may_be_stale=True,
        serial_batches=False,
    ),
}
"""Every schedule: its line here, its dataclass above, `conf/schedule/NAME.yaml`, its class."""


def entry_of(kind: ScheduleKind) -> ScheduleEntry:
    """The properties of a schedule; `auto` has those of `fused` until it is decided."""
    return SCHEDULES[ScheduleKind.fused if kind is ScheduleKind.auto else kind]


def on_policy_names() -> str:
    """`a or b`: the schedules whose samples are of the weights that train on them."""
    return " or ".join(kind.value for kind, e in SCHEDULES.items() if not e.may_be_stale)
