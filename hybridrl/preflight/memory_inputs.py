"""What the memory plan's sizes depend on: the longest rows, and choices that ranks make."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PretrainedConfig

from hybridrl.config import Attention, Config, Device, RolloutLayoutConfig, TrainLayoutConfig
from hybridrl.flow import Graph
from hybridrl.flow.graph import SourceStage
from hybridrl.models.attention_choice import OBSTACLES
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.load import TORCH_DTYPES
from hybridrl.pipelines.prompt_groups import KEYS_PER_TOKEN
from hybridrl.pipelines.standard import least_micro_batches


@dataclass(frozen=True, slots=True)
class PackedRow:
    """The longest row of tokens: `scored` of them have a log-probability, or a value.

    `number` is how many rows an update has on a rank; 0 is unknown, and more than one. A row that
    is a chunk of a sequence comes after `earlier` tokens of it. So many `ranks` share the row, each
    with `tokens`. With shared prompts the sequences of the row attend to `keys` in all, those of
    full samples.
    """

    tokens: int
    scored: int
    number: int = 0
    earlier: int = 0
    ranks: int = 1
    keys: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        graph: Graph,
        layout: TrainLayoutConfig | RolloutLayoutConfig,
        ranks: int,
    ) -> "PackedRow":
        """The longest that the config allows: a micro-batch, or a full sample.

        Of clients' data every position is scored, and a rank has as many as it can compute. Else it
        is not longer than what a replica of this `layout`, on so many `ranks`, gets of a step,
        of full samples. These cost alike, so a rank has at most one more than its share.
        """
        longest = config.longest_sample
        most = config.trainer.max_tokens_per_micro_batch
        if graph.from_clients:
            tokens, sharing = _of_rank(config, layout, most)
            return cls(tokens, tokens, ranks=sharing)
        sources = [s for s in graph.stages.values() if isinstance(s, SourceStage)]
        number = 0
        if all(source.num_samples is not None for source in sources):
            samples = sum(source.num_samples or 0 for source in sources)
            samples *= config.trainer.prompts_per_step
            replicas = ranks // (layout.pp * layout.tp)
            share = -(-samples * longest // replicas) + longest
            number = 1 if share <= most and layout.pp == 1 else 0
            if layout.pp > 1:
                of_update = -(-samples // (replicas * config.trainer.mini_batches)) + 1
                number = _rows_of_round(config, layout, of_update)
            most = min(most, share)
        if isinstance(layout, RolloutLayoutConfig) and config.strict:  # it scores one by one
            most = longest
        tokens, sharing = _of_rank(config, layout, most)
        new = config.rollout.max_new_tokens
        # Of ranks that share a sample the last ones have nothing of its prompt.
        if sharing > 1:
            return cls(tokens, min(tokens, new), number, ranks=sharing)
        if not config.trainer.shares_prompts:
            return cls(tokens, -(-tokens * new // longest), number)
        # Of as many full samples as share a prompt; a row that is shorter has fewer.
        prompt = longest - new
        numbers = [source.num_samples or tokens for source in sources]
        group = max(1, min(sum(numbers), (tokens - prompt) // new))
        of_group = prompt + group * new
        # Responses that are short have more keys for a token: those of their prompt.
        samples = sum(numbers)
        keys = min(KEYS_PER_TOKEN, samples + 1) * tokens if samples > 1 else 0
        return cls(tokens, -(-tokens * group * new // of_group), number, keys=keys)

    @classmethod
    def chunk_of(
        cls, config: Config, layout: TrainLayoutConfig, whole: bool = False
    ) -> "PackedRow | None":
        """The last chunk of the longest sample; None where no sample is trained in chunks.

        With `whole` every position of a sample is scored.
        """
        tokens, most = config.trainer.chunk_tokens, config.trainer.max_tokens_per_micro_batch
        longest = config.longest_sample
        if not tokens or longest <= most * layout.cp:
            return None
        scored = tokens if whole else min(tokens, config.rollout.max_new_tokens)
        return cls(tokens, scored, earlier=longest - tokens * layout.cp, ranks=layout.cp)


@dataclass(frozen=True, kw_only=True, slots=True)
class LongestInputs:
    """What a rank computes at once, at most.

    `row` gives that of a layout on a number of ranks, in training or in scoring. `chunk` gives that
    of a sample that a layout trains in chunks. `prompt` are the tokens that a prefill reads of one
    sample. A decode step copies the keys and values of `copied` tokens; 0: of the whole cache.
    A prompt has at most so many `pads` of images, where the model reads them; None: it may be pads
    alone.
    """

    row: Callable[[TrainLayoutConfig | RolloutLayoutConfig, int], PackedRow]
    prompt: int
    copied: int = 0
    chunk: Callable[[TrainLayoutConfig], PackedRow | None] = lambda layout: None
    pads: int | None = None

    @classmethod
    def of(cls, config: Config, graph: Graph, pads: int | None = None) -> "LongestInputs":
        """What the config allows. A sample that is resumed is read whole; a strict one's prompt."""
        longest = config.longest_sample
        return cls(
            row=lambda layout, ranks: PackedRow.of(config, graph, layout, ranks),
            prompt=config.data.max_prompt_tokens if config.strict else longest,
            copied=longest if config.strict else 0,  # each sample decodes alone
            chunk=lambda layout: PackedRow.chunk_of(config, layout, graph.from_clients),
            pads=pads,
        )


def _of_rank(
    config: Config, layout: TrainLayoutConfig | RolloutLayoutConfig, most: int
) -> tuple[int, int]:
    """Tokens of a row of at most `most`, or of a longer sample; and the ranks that share it.

    Ranks of cp share a longer sample; of chunks each has at most a micro-batch.
    """
    longest, trainer = config.longest_sample, config.trainer
    if not isinstance(layout, TrainLayoutConfig):
        return max(most, longest), 1
    of_rank = min(-(-longest // layout.cp), most if trainer.chunk_tokens else longest)
    return max(most, of_rank), layout.cp if longest > trainer.max_tokens_per_micro_batch else 1


def _rows_of_round(
    config: Config, layout: TrainLayoutConfig | RolloutLayoutConfig, samples: int
) -> int:
    """Rows that a pipeline computes at once, at most, if a replica's update has so many samples.

    Of a sample in chunks these are the rows, or one for each shorter sample.
    """
    longest, most = config.longest_sample, config.trainer.max_tokens_per_micro_batch
    chunk, cp = config.trainer.chunk_tokens, getattr(layout, "cp", 1)
    if chunk and longest > most * cp:
        rows = max(-(-longest // (chunk * cp)), samples * cp)
    elif longest > most:  # each is a row, on all ranks that share it
        rows = samples * cp
    else:
        rows = -(-samples // (most // longest))
    if isinstance(layout, RolloutLayoutConfig):
        return rows
    return least_micro_batches(layout.schedule.value, layout.pp, rows)


def samples_of_rank(
    config: Config,
    graph: Graph,
    layout: TrainLayoutConfig | RolloutLayoutConfig,
    ranks: int,
    batches: int = 1,
) -> int:
    """The samples that a replica of this `layout` gets of one of a step's `batches`, at most.

    Samples that cost alike differ by one a replica.
    """
    of_batch = -(-graph.group_size * config.trainer.prompts_per_step // batches)
    replicas = max(1, ranks // (layout.pp * layout.tp * getattr(layout, "cp", 1)))
    return min(of_batch, -(-of_batch // replicas) + 1)


def kept_ids_of(config: Config, shape: PretrainedConfig) -> int:
    """The ids that truncated sampling keeps of a token, at most; 0 where training knows none."""
    return min(config.rollout.top_k, shape.vocab_size) * config.rollout.replays_sampling


def itemsize_of(config: Config) -> int:
    """Bytes of an element in the compute format."""
    return TORCH_DTYPES[config.model.compute_dtype].itemsize


def attention_of(config: Config, shape: PretrainedConfig) -> Attention:
    """What `choose_attention` chooses for this shape, where the run's is not `auto` any more."""
    dtype = TORCH_DTYPES[config.model.compute_dtype]
    of_chosen = OBSTACLES.get(config.model.attention)
    if of_chosen and of_chosen(dtype, attention_shape(shape), None):
        return Attention.torch
    return config.model.attention


def has_triton(config: Config) -> bool:
    """Whether the head's kernels are Triton's."""
    return config.cluster.device is Device.cuda and itemsize_of(config) == 2


def checked_shape(config: Config) -> PretrainedConfig:
    """The model's config, which the layouts can take."""
    from hybridrl.models.config_json import check_expert_settings
    from hybridrl.models.parallel import check_gen_layout, check_train_layout
    from hybridrl.models.shape import model_shape

    shape, gen = model_shape(config.model), config.rollout.layout
    check_expert_settings(shape.to_dict(), config.trainer)
    check_train_layout(shape, config.trainer.layout)
    check_gen_layout(shape, gen.pp, gen.tp, ep=gen.ep)
    return shape
