"""Sharding of the weights over the ranks, in training and in generation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from hybridrl.config.bounds import bounded
from hybridrl.config.errors import ConfigError


class PipelineSchedule(Enum):
    """Order of the micro-batches in a training pipeline."""

    one_f_one_b = "one_f_one_b"
    """1F1B (PipeDream-flush): one chunk of layers a rank."""
    interleaved = "interleaved"
    """Interleaved 1F1B (Megatron): two chunks a rank, smaller bubbles, more messages."""
    zero_bubble = "zero_bubble"
    """ZBV (zero bubble, V-shaped): two chunks a rank, weight gradients fill the bubbles."""

    @property
    def chunks_per_rank(self) -> int:
        """Chunks of consecutive layers that a rank holds."""
        return 1 if self is PipelineSchedule.one_f_one_b else 2


class Grouping(Enum):
    """Orders of ranks in generation."""

    strided = "strided"
    """Every rank generates with its training shard (HybridFlow)."""
    vanilla = "vanilla"
    """Ranks in their own order, as in the baseline HybridFlow-V and in vLLM."""
    node_strided = "node_strided"
    """Each node's ranks have the places of `vanilla`, dealt among them as `strided` would."""
    auto = "auto"
    """The one of these whose groups span the fewest nodes, then the one of fewest bytes."""


@dataclass(kw_only=True, slots=True)
class TrainLayoutConfig:
    """Sizes of the training axes; the product of all but ep and cp is the number of ranks."""

    pp: int = bounded(1, least=1)
    """Pipeline stages."""
    replicas: int = bounded(1, least=1)
    """Copies of the sharded model (hybrid sharded data parallelism)."""
    fsdp: int = bounded(0, least=0)
    """Ranks over which FSDP2 shards; 0 takes the ranks that the other axes leave."""
    tp: int = bounded(1, least=1)
    """Tensor parallelism."""
    ep: int = bounded(1, least=1)
    """Expert parallelism, over the ranks of fsdp x tp; FSDP shards experts over those left."""
    ep_grouping: Grouping = Grouping.auto
    """Which ranks share the experts. `strided`: far ones, whose shards nest in those of generation;
    `vanilla`: consecutive ones; `auto`: strided, or vanilla where only that stays in a node."""
    cp: int = bounded(1, least=1)
    """Context parallelism: so many ranks of fsdp share a row too long for one of them."""
    sequence_parallel: bool = False
    """Under tp, split activations between the blocks by tokens: same traffic, less memory."""
    schedule: PipelineSchedule = PipelineSchedule.one_f_one_b
    """Order of the micro-batches under pp."""
    chunk_layers: list[int] = field(default_factory=list)
    """Layers of each pipeline chunk, in the order of the forward pass; empty: as even as can be.
    With fewer on the last one, the head makes no slowest stage (RoundPipe, arXiv 2604.27085)."""

    @property
    def num_chunks(self) -> int:
        """Pipeline chunks in all; 1 without a pipeline."""
        return self.pp * self.schedule.chunks_per_rank if self.pp > 1 else 1

    @property
    def zigzag(self) -> bool:
        """Whether chunks run down the ranks and back."""
        return self.schedule is PipelineSchedule.zero_bubble

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass has two halves, for the input and for the weights."""
        return self.pp > 1 and self.zigzag

    def resolve(self, ranks: int) -> None:
        """Fill `fsdp` in where it is 0 and the other axes divide the number of `ranks`."""
        others = self.pp * self.replicas * self.tp
        if self.fsdp == 0 and ranks % others == 0:
            self.fsdp = ranks // others

    def place_experts(self, ranks: int, ranks_per_node: int) -> None:
        """Decide an `ep_grouping` of `auto`, once the other axes are known.

        It stays `auto`, which is strided, where that crosses no node or vanilla does too.
        """
        block = self.fsdp * self.tp
        if self.ep_grouping is not Grouping.auto or not block or block % self.ep:
            return
        ranks_per_node = max(1, ranks_per_node)

        def crosses(group: Sequence[int]) -> bool:
            starts = range(0, ranks, block)
            return any(len({(start + i) // ranks_per_node for i in group}) > 1 for start in starts)

        efsdp = block // self.ep
        near = [range(start, start + self.ep) for start in range(0, block, self.ep)]
        far = [
            [q % self.fsdp * self.tp + q // self.fsdp for q in range(start, block, efsdp)]
            for start in range(efsdp)
        ]
        if any(map(crosses, far)) and not any(map(crosses, near)):
            self.ep_grouping = Grouping.vanilla

    def check(
        self, ranks: int, key: str = "trainer.layout", ranks_key: str = "cluster.ranks"
    ) -> None:
        """Raise ConfigError where the product of the axes is not the number of `ranks`.

        Also where ep or cp does not divide its ranks. `key` is the place of these settings,
        `ranks_key` that of the number.
        """
        if self.pp * self.replicas * self.fsdp * self.tp != ranks:
            sizes = f"{self.pp} x {self.replicas} x {self.fsdp or '?'} x {self.tp}"
            allowed = f"pp x replicas x fsdp x tp = {ranks_key}={ranks}"
            raise ConfigError(key, sizes, allowed)
        if self.fsdp * self.tp % self.ep:
            allowed = f"a divisor of fsdp x tp = {self.fsdp} x {self.tp}"
            raise ConfigError(f"{key}.ep", self.ep, allowed)
        if self.fsdp % self.cp:
            raise ConfigError(f"{key}.cp", self.cp, f"a divisor of {key}.fsdp={self.fsdp}")
        wrong = len(self.chunk_layers) != self.num_chunks or min(self.chunk_layers) < 1
        if self.chunk_layers and wrong:
            allowed = f"{self.num_chunks} numbers from 1, one for each pipeline chunk"
            raise ConfigError(f"{key}.chunk_layers", self.chunk_layers, allowed)


@dataclass(kw_only=True, slots=True)
class RolloutLayoutConfig:
    """Sizes of one generation instance; there are as many instances as fit in the ranks."""

    pp: int = bounded(1, least=1)
    """Pipeline stages of an instance."""
    tp: int = bounded(1, least=1)
    """Tensor parallelism of an instance."""
    ep: int = bounded(1, least=1)
    """1: tp cuts every expert. Equal to tp: each rank has whole experts."""
    grouping: Grouping = Grouping.auto
    """Which rank takes which place in generation."""
    bucket_mb: float | None = bounded(None, least=0.1, most=1e6, allowed="0.1 to 1e6, or null")
    """MB of a bucket of the weight switch; two are in flight. null: 128 on GPUs, 16 on CPUs."""

    @property
    def ranks(self) -> int:
        """Ranks of an instance."""
        return self.pp * self.tp

    def bucket_bytes(self, device: str) -> int:
        """Bytes of a bucket between ranks on devices of that type, `cuda` or `cpu`.

        A round of eight GPUs that gather 16 MB has 2 MB of each: its calls would take longer than
        the links. On CPUs memory is scarcer than calls.
        """
        default = {"cuda": 128.0, "cpu": 16.0}[device]
        return round((self.bucket_mb or default) * 2**20)

    def check(self, ranks: int, ranks_key: str = "cluster.ranks") -> None:
        """Raise ConfigError where the ranks are not a whole number of instances."""
        if ranks % (self.pp * self.tp):
            allowed = f"pp x tp that divides {ranks_key}={ranks}"
            raise ConfigError("rollout.layout", f"{self.pp} x {self.tp}", allowed)
        if self.ep not in (1, self.tp):
            raise ConfigError("rollout.layout.ep", self.ep, f"1, or rollout.layout.tp={self.tp}")

    def check_pushed(self, with_pool: str) -> None:
        """Raise ConfigError for settings of the switch, which ranks that generate alone have not.

        Their weights are pushed to them, in the ranks' own order.
        """
        if self.grouping is not Grouping.auto:
            allowed = f"auto {with_pool}: weights are pushed, in the ranks' own order"
            raise ConfigError("rollout.layout.grouping", self.grouping.value, allowed)
        if self.bucket_mb is not None:
            allowed = f"null {with_pool}: weights are pushed, without a switch"
            raise ConfigError("rollout.layout.bucket_mb", self.bucket_mb, allowed)
