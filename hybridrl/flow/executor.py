"""The interface between a schedule and the machinery below it: commands in, events out.

The driver implements `Executor` with worker groups and wall time; the planner and the tests
implement it with a cost model and virtual time. A schedule cannot tell them apart.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Protocol

from hybridrl.config.sampling import SamplingConfig
from hybridrl.flow.clock import Clock
from hybridrl.flow.graph import AnswersStage, Stage, UpdateStage
from hybridrl.flow.instance_work import NO_WORK, Work
from hybridrl.flow.sample import Sample, SampleId, Scalar, TokenSpan
from hybridrl.flow.saved_samples import SavingCommand

ENOUGH_TURNS = 8
"""A call returns once a turn has ended for one in so many of the samples that still decode.

So it is until costs are known (`turns.enough_turns`).
"""


TRAINING_POOL = -1
"""The place of `train_early` that is all ranks that train, where instances are `separate`."""


class Phase(Enum):
    """The use that the ranks' memory is laid out for."""

    GENERATE = "generate"  # generation weights and KV cache are in place
    TRAIN = "train"  # training shards and optimizer are in place


class Scope(Enum):
    """The ranks that have to take part in a per-sample stage."""

    RANK = "rank"  # the sample's rank, concurrently with its other work (verifiers, `map`)
    INSTANCE = "instance"  # one generation instance, which holds the role's whole weights
    WORLD = "world"  # all ranks together in TRAIN, since the role's weights are sharded over them
    POOL = "pool"  # the role's own pool of ranks, in any phase: no sample lives there
    DRIVER = "driver"  # none: the driver calls it, in any phase (judges that wait)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings with which one response is drawn.

    `temperature` 0 is greedy; `max_new_tokens` in tokens. The rest is that of `SamplingConfig`, and
    the defaults draw from the whole distribution; `bad_words` are texts. With `keeps_ids` training
    renormalizes over the ids that each token was drawn from, where these are not all.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    ignore_eos: bool = False
    max_turn_tokens: int = 0  # of one turn of a conversation; 0: the response is one turn
    keeps_ids: bool = False

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn at random from a part of the distribution."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @classmethod
    def of(cls, settings: SamplingConfig, max_new_tokens: int, temperature: float) -> "Sampling":
        """The `settings` of training's rollouts or of an evaluation set."""
        values = {
            setting.name: getattr(settings, setting.name) for setting in fields(SamplingConfig)
        }
        values["logit_bias"] = tuple(settings.logit_bias.items())
        values["bad_words"] = tuple(settings.bad_words)
        return cls(max_new_tokens, temperature, **values)


@dataclass(frozen=True, slots=True)
class Submit:
    """Start these samples of one prompt on an instance; they share the prompt's KV blocks.

    `prompt` is opaque to schedules (token ids and the item to be judged). With `rests_at` each is
    parked once it has so many response tokens and has not ended; 0: never.
    """

    ids: tuple[SampleId, ...]
    prompt: Any
    sampling: Sampling
    rests_at: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Park:
    """Stop these samples, keeping their tokens, so that they can resume later or elsewhere.

    `with_kv` keeps the keys and values too. Those that finish before the command arrives are passed
    over. They resume on an instance, or with a `width` above 1 on a wide one of so many members.
    """

    ids: tuple[SampleId, ...]
    with_kv: bool = False
    width: int = 1


@dataclass(frozen=True, slots=True)
class Parked:
    """The samples that a `Park` has stopped; `tokens` counts prompt and response so far.

    `version` is that of the weights that made the last tokens (and the keys and values, if kept).
    `state` is opaque to schedules: references to the parked tensors. `width` is that of `Park`.
    """

    ids: tuple[SampleId, ...]
    tokens: tuple[int, ...]
    version: int
    state: Any
    width: int = 1


@dataclass(frozen=True, slots=True)
class Resume:
    """Continue some of the samples of `parked`, on any instance of its width. Each is resumed once.

    Keys and values that were kept are used if they are of the instance's weights, or with
    `stale_kv`. Else, and with `recompute`, they are computed again from the tokens. `rests_at` is
    as for `Submit`.
    """

    ids: tuple[SampleId, ...]
    parked: Parked
    stale_kv: bool = False
    rests_at: tuple[int, ...] = ()
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class EpisodeReply:
    """What an environment answers to the turn of a sample that waits for it.

    `tokens` continue the response: what the chat template puts between the turn and the opening of
    the next one. None of them is trained. None instead of tokens: the episode has ended. Then
    `turn_rewards` has what each turn has earned, and `scalars` are new ones of the sample, among
    them `out_of_tokens`.
    `finish` is `stop`, `length` where a limit ended it, or `abort` where the sample is dropped.
    """

    id: SampleId
    tokens: tuple[int, ...] | None
    finish: str = "stop"
    turn_rewards: tuple[float, ...] = ()
    scalars: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """Continue samples whose turn has ended, or finish those whose episode has.

    One that could not resume before, in the same call, is passed over (`Advanced.lost`).
    """

    replies: tuple[EpisodeReply, ...]

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """The samples that are answered."""
        return tuple(reply.id for reply in self.replies)


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Take the weights of `version`, which have been pushed, before any other command of a call.

    Unfinished samples go on under them. With `keeps_kv` they do so on the keys and values that they
    have, else these are computed again. Schedules leave the rest to the executor: references to the
    arrays of a rank's place, to the deltas that make them of what the rank has (None where one goes
    whole), and to routing biases.
    """

    version: int
    keeps_kv: bool = False
    arrays: tuple[Any, ...] = ()
    deltas: tuple[Any, ...] = ()
    biases: Any = None
    ids = ()


@dataclass(frozen=True, slots=True)
class FetchWeights:
    """Begin to bring weights to the rank that it will load; executors add it to calls."""

    arrays: tuple[Any, ...]
    ids = ()


@dataclass(frozen=True, slots=True)
class CopyTokens:
    """Give copies of all unfinished samples at the end of the call; they go on."""

    ids = ()


Command = LoadWeights | FetchWeights | Submit | Park | Resume | Answer | CopyTokens | SavingCommand


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample has its last token; its tensors (`tokens`, `log_probs`) are on `rank`.

    `more_tensors` names those that its stage does not declare, since settings ask for them.

    `finish` is `stop`, `length`, or `abort` where the engine gave up: then the sample is dropped.
    `spans` say which version of the actor made which response tokens. `scalars` are those that its
    episode has ended with.
    """

    id: SampleId
    rank: int
    prompt_tokens: int
    response_tokens: int
    finish: str
    spans: tuple[TokenSpan, ...]
    more_tensors: tuple[str, ...] = ()
    scalars: Mapping[str, float | int | str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The model's turn has its last token: its sample is held until it is answered (`Answer`).

    `tokens` are those of the turn, `text` what they say; `finish` is `stop` or `length`.
    `response_tokens` counts all of the response so far, replies too.
    """

    id: SampleId
    tokens: tuple[int, ...]
    text: str
    finish: str
    response_tokens: int


def generated_tensors(finished: Sequence[Finished]) -> tuple[str, ...]:
    """The tensors of samples that a rollout engine has finished, which are the same of all."""
    return ("tokens", "log_probs", *(finished[0].more_tensors if finished else ()))


@dataclass(frozen=True, slots=True)
class Advanced:
    """One bounded call of an instance has returned, with `running` samples still unfinished.

    `lost` are samples that could not resume, since their parked state died with its instance.
    `turns` are samples that wait for their environments from now on; `running` counts none of those
    that wait. `copies` has all that are not finished, without keys and values, where `CopyTokens`
    asked for them.
    """

    instance: int
    running: int
    finished: tuple[Finished, ...]
    parked: tuple[Parked, ...] = ()
    lost: tuple[SampleId, ...] = ()
    work: Work = NO_WORK
    turns: tuple[TurnEnded, ...] = ()
    copies: tuple[Parked, ...] = ()


@dataclass(frozen=True, slots=True)
class Replied:
    """Environments have answered turns (`TurnEnded`); `seconds` that each has waited.

    The executor hands turns to environments when it knows of them; they answer in any order. A
    `Submit` begins a new episode, and no reply of an earlier one of the sample comes afterwards.
    Where a run continues, the executor replays the episodes of pending samples that wait
    (`PendingSample.waits`), resumed or not. `Executor.release` closes those that have not ended.
    """

    replies: tuple[EpisodeReply, ...]
    seconds: tuple[float, ...]

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """The samples that are answered."""
        return tuple(reply.id for reply in self.replies)


@dataclass(frozen=True, slots=True)
class Computed:
    """A per-sample stage has run on these samples: new scalars by sample, new tensor fields.

    `instance` is the one that an `infer` has kept busy. `seconds` is the time of the work itself,
    for the cost model. It is None where it is not known: the work had to wait for its turn, or
    its results were recorded. The tensors are where the samples are, wherever they were made.
    """

    stage: str
    ids: tuple[SampleId, ...]
    scalars: dict[str, tuple[Scalar, ...]]
    tensors: tuple[str, ...]
    instance: int | None = None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class SamplesRead:
    """A stage of scope DRIVER has what it reads of these samples, which may move from now on.

    Its `Computed` follow, in any order, one or more for the samples of one `compute`.
    """

    stage: str
    ids: tuple[SampleId, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """The rollout engine's log-probabilities are compared; no metrics where samples were lost."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class TargetsLoaded:
    """Answers of the dataset have become responses: `tokens` of each is on its rank."""

    stage: str
    finished: tuple[Finished, ...]


@dataclass(frozen=True, slots=True)
class EarlyTrained:
    """An instance has the gradient of these samples of an update; `seconds` of its work.

    Where an instance died before the pool that trains had copies, it passes over groups that lost a
    sample. Nothing of it has left the instance yet: the update sums the gradients of all.
    """

    stage: str
    instance: int
    ids: tuple[SampleId, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class UpdateDone:
    """An update has ended, with the metrics of its steps."""

    stage: str
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class UpdateRefused:
    """An update has not begun, since some of its samples died with their instance (`WorkerDied`).

    Ranks that train are as they were, with what they have trained early.
    """

    stage: str


@dataclass(frozen=True, slots=True)
class WeightsReady:
    """Every generation instance has the weights of `version` (`Executor.sync_weights`)."""

    version: int


@dataclass(frozen=True, slots=True)
class WeightsPushed:
    """Generation ranks can take the weights of `version` (`LoadWeights`)."""

    version: int


@dataclass(frozen=True, slots=True)
class Prepared:
    """The ranks of these instances are laid out for `phase` (`Executor.prepare`)."""

    places: tuple[int, ...]
    phase: Phase


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """An instance is gone, with its calls in flight, the samples it held and the tensors there.

    Later events with these ids are about the samples that are made anew. No results come of a stage
    of whole groups for a group that has lost a sample.
    """

    instance: int


Event = (
    Advanced
    | Replied
    | Computed
    | Compared
    | SamplesRead
    | TargetsLoaded
    | EarlyTrained
    | UpdateDone
    | UpdateRefused
    | WeightsReady
    | WeightsPushed
    | Prepared
    | WorkerDied
)


class StagePlaces(Protocol):
    """Where each stage runs, which is known before a process starts."""

    def scope(self, stage: Stage) -> Scope:
        """The ranks that take part in a per-sample stage."""
        ...

    def pool(self, stage: Stage) -> str:
        """The name of the ranks that a stage's role is on; different pools share none."""
        ...


class Executor(StagePlaces, Protocol):
    """The seam between a schedule and its backend.

    What starts work returns at once, and `wait` blocks until at least one piece has ended.
    `sync_weights` and `prepare` begin when no other call is in flight, and no other call begins
    before they have ended. At most one `advance`, `infer` or `train_early` is in flight per
    instance, and one `update` per pool, whose ranks get no other call meanwhile. Events of one call
    keep their order; schedules must not depend on the order of different calls for anything that
    reaches the training batch. Between `WeightsReady` and the next `prepare` no call needs two
    instances. A wide one counts as one (`wide`).
    """

    clock: Clock

    @property
    def instances(self) -> Sequence[int]:
        """The numbers of the generation instances that live."""
        ...

    @property
    def wide(self) -> Mapping[int, tuple[int, ...]]:
        """The members of every wide instance that can be formed, by its number.

        A call of `advance` with that number forms it, and it is one instance as long as it has
        unfinished samples. Until then its members have none, and no call in flight. None of them is
        called meanwhile, and none trains.
        """
        ...

    @property
    def version(self) -> int:
        """Optimizer steps of the weights that generate: those of the last `WeightsReady`."""
        ...

    def instance_of(self, rank: int) -> int:
        """The instance that a rank belongs to."""
        ...

    def sync_weights(self) -> None:
        """Have every instance generate with the newest weights; ends with `WeightsReady`.

        Where the ranks train too, they enter GENERATE: this is the weight switch. Elsewhere it is
        a push, and a load on each instance.
        """
        ...

    @property
    def separate(self) -> bool:
        """Whether instances have ranks of their own, which do not train."""
        ...

    def push_weights(self) -> None:
        """Have training ranks push their weights for `LoadWeights`; ends with `WeightsPushed`.

        Only where instances are `separate`. An instance takes them when a call tells it to.
        """
        ...

    def keep_versions(self, versions: Collection[int]) -> None:
        """No instance will load pushed weights but of these versions, and the newest."""
        ...

    def prepare(self, places: Sequence[int], phase: Phase) -> None:
        """Bring the ranks of these instances into `phase`; ends with `Prepared`.

        They enter GENERATE with their weights alone (`sync_weights`).
        """
        ...

    def advance(
        self,
        instance: int,
        commands: Sequence[Command],
        num_decode_steps: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> None:
        """Hand `commands` to an instance and let it run at most `num_decode_steps` steps.

        It returns earlier once a turn has ended for one in `enough_turns` of those that decode.
        """
        ...

    def load_targets(
        self, stage: AnswersStage, ids: Sequence[SampleId], prompts: Sequence[Any]
    ) -> None:
        """Make the dataset's target of each prompt the response of a sample (`AnswersStage`).

        In any phase, without a generation engine. Sample number i goes to rank i modulo the ranks.
        Ends with `TargetsLoaded` (one for all ranks or one each).
        """
        ...

    def compute(self, stage: Stage, samples: Sequence[Sample]) -> None:
        """Run a stage of scope RANK or WORLD on the samples' ranks, of POOL on the pool's ranks.

        Ends with `Computed` (one for all samples, or one per rank). The fields that a pool reads
        are copied there, and its results come to the samples' ranks; samples do not move meanwhile.
        Of scope DRIVER they do not move until `SamplesRead`. With `stage.whole_groups` all samples
        of a prompt that come to the stage are among `samples`.
        """
        ...

    def scores_together(self, stages: Sequence[Stage], stage: Stage) -> bool:
        """Whether a stage of scope WORLD joins `stages`, others of that scope, in one call."""
        ...

    def compute_together(self, stages: Sequence[Stage], samples: Sequence[Sample]) -> None:
        """Run stages of scope WORLD as one (`scores_together`); ends with `Computed` of each."""
        ...

    def infer(self, stage: Stage, instance: int, samples: Sequence[Sample]) -> None:
        """Run a stage of scope INSTANCE; samples of other instances move to `instance` for good.

        The instance holds no unfinished sample; nothing else runs on samples that move. It gives up
        its KV cache and takes up the role's weights. Sets `rank` of samples that move. Ends with
        one `Computed` that names the instance.
        """
        ...

    def wait(self) -> list[Event]:
        """Events of at least one call in flight; raises `RuntimeError` when there is none."""
        ...

    def train_early(self, stage: UpdateStage, instance: int, samples: Sequence[Sample]) -> None:
        """Forward and backward of an update that is to come, on some of its samples; in GENERATE.

        Those of other instances move to `instance` for good, as for `infer`. The instance holds no
        unfinished sample. It gives up its generation weights and takes up its training shards. So
        until the next `sync_weights` it decodes no more, and no pass of the actor's runs there.
        Where instances are `separate` the place is `TRAINING_POOL`, in any phase, and copies of the
        samples go there. Each sample is trained once. Ends with `EarlyTrained`. The gradients are
        thrown away where `sync_weights` comes before the update.
        """
        ...

    def compare(self, stage: UpdateStage, samples: Sequence[Sample]) -> None:
        """Compare both engines' log-probabilities of samples that an update is not to train on.

        Only where instances are `separate`, before the actor's update begins. Its present weights
        have made the samples, which stay as they are. Ends with `Compared`.
        """
        ...

    def fuses(self, stages: Sequence[UpdateStage], stage: UpdateStage) -> bool:
        """Whether an update of the pool of `stages` joins them in one call."""
        ...

    def update(self, updates: Sequence[tuple[UpdateStage, Sequence[Sample]]]) -> None:
        """Train on samples, which are in training order; in TRAIN. Ends with an `UpdateDone` each.

        Several updates are of one pool (`fuses`). Samples of `train_early` are among them and
        count, but are not computed again.
        """
        ...

    def release(self, ids: Sequence[SampleId]) -> None:
        """These samples have left, trained or dropped: the ranks may forget their tensors.

        Nobody waits for it, and it ends with no event.
        """
        ...
