"""Runs of engines, switches and a rank's whole life, held to the order that NCCL keeps."""

import os
import pickle
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from nccl_order import FaultKind, Log, Op, check
from nccl_recorder import Recorder, fake_logs, fake_rank, logging_rounds
from torch.distributed.device_mesh import init_device_mesh

from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.config import (
    ClusterConfig,
    Config,
    DataConfig,
    Device,
    Engine,
    Grouping,
    ModelConfig,
    OptimConfig,
    PipelineSchedule,
    RolloutConfig,
    RolloutLayoutConfig,
    TinyModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.rollout import ENGINES
from hybridrl.data import Item
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.flow.executor import Command, Park, Parked, Phase, Resume, Sampling, Submit
from hybridrl.flow.graph import ComputeStage
from hybridrl.flow.sample import SampleId
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.parameters import BOTH, FIRST, LAST, Parameter
from hybridrl.layout.plan import Plan
from hybridrl.layout.process_groups import warm_up
from hybridrl.layout.switching import plan_switch
from hybridrl.layout.weight_switch import WeightSwitch, connect_peers, gather_groups
from hybridrl.models.tiny import make_tiny_model
from hybridrl.workers.actor_worker import ActorWorker

pytestmark = pytest.mark.long

TINY = TinyModelConfig(
    hidden_size=16, intermediate_size=24, num_layers=8, num_heads=4, num_kv_heads=4, head_dim=4,
    max_positions=64, alphabet="abcdefghij",
)  # fmt: skip
CPU = torch.device("cpu")
VOCAB_MULTIPLE = ENGINES[Engine.vllm].vocab_multiple
Ranks = Any


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    make_tiny_model(path, TINY, seed=0)
    return str(path)


def own_sequences() -> list[TrainSequence]:
    """This rank's share of eight sequences of nine tokens."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 13, (8, 9), generator=random)
    return [TrainSequence(row, 5) for row in ids[dist.get_rank() :: dist.get_world_size()]]


def make_engine(path: str, layout: TrainLayoutConfig) -> TrainEngine:
    """In micro-batches of one sequence."""
    trainer = TrainerConfig(
        max_tokens_per_micro_batch=12, optim=OptimConfig(lr=1e-2), layout=layout
    )
    return TrainEngine(path, model=ModelConfig(), trainer=trainer, device=CPU)


def score_and_train(path: str, layout: TrainLayoutConfig) -> None:
    engine = make_engine(path, layout)
    engine.log_probs(own_sequences())
    engine.update(own_sequences(), CrossEntropyLoss())


@pytest.mark.layouts
@pytest.mark.parametrize("pp", [2, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 8))])
@pytest.mark.parametrize("schedule", PipelineSchedule)
def test_pipelines(
    ranks: Ranks, model: str, tmp_path: Path, schedule: PipelineSchedule, pp: int
) -> None:
    if pp == 8:  # two chunks a rank
        model = str(tmp_path / "model")
        make_tiny_model(Path(model), replace(TINY, num_layers=16), seed=0)
    layout = TrainLayoutConfig(pp=pp, schedule=schedule)
    _, logs = ranks.recorded(pp, score_and_train, model, layout)
    faults = check(logs)
    assert not faults, "\n".join(map(str, faults))


# The weight switch, in a world where nothing is sent


def dense_model(vocab: int, tied: bool, heads: int = 8, layers: int = 4) -> list[Parameter]:
    """A decoder of which no weight has more than a few elements."""
    parameters = [Parameter("embed", (vocab, heads), BOTH if tied else FIRST, 0)]
    for i in range(layers):
        parameters += [
            Parameter(f"{i}.q", (2 * heads, heads), i, 0, units=heads),
            Parameter(f"{i}.k", (2 * heads, heads), i, 0, units=heads),
            Parameter(f"{i}.o", (heads, 2 * heads), i, 1, units=heads),
            Parameter(f"{i}.norm", (heads,), i),
        ]
    parameters.append(Parameter("norm", (heads,), LAST))
    return parameters if tied else [*parameters, Parameter("head", (vocab, heads), LAST, 0)]


def heads_for(num_ranks: int) -> int:
    """Attention heads, or experts, that any split of the ranks divides."""
    return 12 if num_ranks % 3 == 0 else 8


def warm(plan: Plan) -> None:
    warm_up([dist.group.WORLD], CPU)
    warm_up(gather_groups(plan, dist.get_rank()), CPU)
    connect_peers(plan, CPU)


def switch_twice(plan: Plan, bucket_bytes: int) -> None:
    switch = WeightSwitch(plan, dist.get_rank(), torch.float32, bucket_bytes)
    source, destination = (
        {name: torch.zeros(local.shape, device=CPU) for name, local in side.items() if local.shape}
        for side in (switch.source, switch.destination)
    )
    for _ in range(2):
        switch.switch(source, destination)


def warm_and_switch(plan: Plan, bucket_bytes: int) -> None:
    warm(plan)
    switch_twice(plan, bucket_bytes)


def layouts(num_ranks: int) -> Iterator[tuple[TrainAxes, int, int, Grouping]]:
    """Training axes, pp and tp of generation, and its order of ranks: all that divide the ranks."""
    sizes = [size for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    for pp, replicas, fsdp, tp in product(sizes, repeat=4):
        axes = TrainAxes(pp, replicas, fsdp, tp)
        if axes.ranks != num_ranks or pp > 4 or tp > 8:
            continue
        for gen_pp, gen_tp in product(sizes, repeat=2):
            if gen_pp <= 4 and gen_tp <= 8 and num_ranks % (gen_pp * gen_tp) == 0:
                for order in (Grouping.strided, Grouping.vanilla):
                    yield axes, gen_pp, gen_tp, order


def expert_model(experts: int, layers: int = 4) -> list[Parameter]:
    """Experts in every layer, beside other weights."""
    shape = (experts, 2 * experts, 2)
    parameters = [
        Parameter(f"{i}.experts", shape, i, 1, blocks=2, experts=experts) for i in range(layers)
    ]
    return [*dense_model(40, tied=False, heads=experts), *parameters]


BUCKETS = (400, 2**20)
"""Many rounds, and rounds that hold everything: layouts have them in turn."""


def plans(num_ranks: int) -> Iterator[tuple[Any, Plan, int]]:
    """Every layout, its plan, and the bytes of a bucket."""
    for number, at in enumerate(layouts(num_ranks)):
        model = dense_model(40, number % 2 == 0, heads_for(num_ranks))
        yield at, plan_switch(model, *at).plan, BUCKETS[number // 2 % 2]


def vllm_plans(num_ranks: int) -> Iterator[tuple[Any, Plan, int]]:
    """Yield plans as vLLM wants them: ascending ranks, and rows of the vocabulary that it pads."""
    at = (sides for *sides, order in layouts(num_ranks) if order is Grouping.vanilla)
    for number, sides in enumerate(at):
        model = dense_model(131, number % 2 == 0, heads_for(num_ranks))
        plan = plan_switch(model, *sides, vocab_multiple=VOCAB_MULTIPLE, ascending=True).plan
        yield sides, plan, BUCKETS[number // 2 % 2]


def expert_plans(num_ranks: int) -> Iterator[tuple[Any, Plan, int]]:
    """Yield plans of a model with experts, wherever the experts' axes split them."""
    at = (
        (replace(axes, ep=ep), gen_pp, gen_tp, order, gen_ep)
        for axes, gen_pp, gen_tp, order in layouts(num_ranks)
        for ep in range(1, 9)
        if axes.fsdp * axes.tp % ep == 0
        for gen_ep in sorted({1, gen_tp})
        if ep > 1 or gen_ep > 1
    )
    for number, (*sides, gen_ep) in enumerate(at):
        model = expert_model(heads_for(num_ranks))
        plan = plan_switch(model, *sides, gen_ep=gen_ep).plan
        yield (*sides, gen_ep), plan, BUCKETS[number // 2 % 2]


def switch_logs(size: int, plan: Plan, bucket_bytes: int) -> list[Log]:
    """What each rank of a switch sends; the groups' first use is recorded as anywhere."""
    logs: list[Log] = []
    for rank in range(size):
        with fake_rank(rank, size):
            with Recorder() as recorder:
                warm(plan)
            with logging_rounds(recorder.log):
                switch_twice(plan, bucket_bytes)
        logs.append(recorder.log)
    return logs


LONG = (pytest.mark.slow, pytest.mark.timeout(3600))


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("layouts_of", "size"),
    [
        (plans, 2),
        (plans, 3),
        (plans, 4),
        (vllm_plans, 2),
        (vllm_plans, 3),
        (expert_plans, 2),
        (vllm_plans, 4),
        pytest.param(expert_plans, 4, marks=LONG),
        pytest.param(plans, 6, marks=LONG),
        pytest.param(plans, 8, marks=LONG),
        pytest.param(plans, 16, marks=LONG),
        pytest.param(vllm_plans, 6, marks=LONG),
        pytest.param(vllm_plans, 8, marks=LONG),
        pytest.param(expert_plans, 3, marks=LONG),
        pytest.param(expert_plans, 6, marks=LONG),
        pytest.param(expert_plans, 8, marks=LONG),
    ],
)
def test_switches(layouts_of: Callable[[int], Any], size: int) -> None:
    for at, plan, bucket_bytes in layouts_of(size):
        faults = check(switch_logs(size, plan, bucket_bytes))
        assert not faults, (at, "\n".join(map(str, faults)))


def test_rounds_are_logged_as_all_operators_are() -> None:
    for at, plan, bucket_bytes in islice(plans(4), 0, None, 7):
        alone = switch_logs(4, plan, bucket_bytes)
        whole = fake_logs(4, warm_and_switch, plan, bucket_bytes)
        assert [sent(log) for log in alone] == [sent(log) for log in whole], at


def sent(log: Log) -> list[Op]:
    """Operations, without the lines that issue them. Waits of a fake group are not recorded."""
    return [replace(event, site="") for event in log if isinstance(event, Op)]


def test_an_exchange_of_some_ranks_needs_a_warm_group() -> None:
    """A vocabulary that 64 does not divide moves between the outer stages alone."""
    plan = plan_switch(
        dense_model(131, tied=False),
        TrainAxes(pp=4, tp=2),
        4,
        2,
        vocab_multiple=VOCAB_MULTIPLE,
        ascending=True,
    ).plan
    partial, *_ = check(fake_logs(8, switch_twice, plan, 2**20))
    assert partial.kind is FaultKind.partial_batch
    assert "of the ranks [0, 1, 2, 3, 4, 5, 6, 7] only [0, 1, 6, 7] begin" in partial.text
    assert not check(fake_logs(8, warm_and_switch, plan, 2**20))


# Warm-up


def warm_mesh(sizes: tuple[int, ...]) -> int:
    """The number of groups, handed over in an order of the rank's own."""
    names = tuple("abcd"[: len(sizes)])
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    groups = [mesh.get_group(name) for name in names]
    warm_up([*groups[:: (-1) ** dist.get_rank()], dist.group.WORLD, groups[0], None], CPU)
    return len(groups)


def rounds(logs: list[Log]) -> int:
    """Collectives one after another until all ranks have ended theirs."""
    done, todo = 0, [[op for op in log if isinstance(op, Op)] for log in logs]
    while any(todo):
        firsts = {op.group: op for ops in todo for op in ops[:1]}
        ended = {
            group
            for group, op in firsts.items()
            if all(todo[rank] and todo[rank][0].group == group for rank in op.members)
        }
        todo = [ops[1:] if ops and ops[0].group in ended else ops for ops in todo]
        done += 1
    return done


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ((2, 3), 3),
        ((2, 1, 4), 3),
        ((4, 4), 3),
        pytest.param((8, 2, 8, 4), 5, marks=pytest.mark.slow),
    ],
)
def test_a_warm_up_takes_one_collective_an_axis(sizes: tuple[int, ...], groups: int) -> None:
    """The groups of the axes and of the world take one collective each.

    All ranks run each collective at the same time, in whatever order the ranks come.
    """
    size = torch.Size(sizes).numel()
    logs = fake_logs(size, warm_mesh, sizes)
    assert not check(logs)
    assert all(sum(isinstance(event, Op) for event in log) == groups for log in logs)
    assert rounds(logs) == groups


# A rank's life


class Files:
    """A data plane of files."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def put(self, value: Any) -> Any:
        file = self.folder / uuid.uuid4().hex
        file.write_bytes(pickle.dumps(value))
        return str(file)

    def get(self, references: list[Any]) -> list[Any]:
        return [pickle.loads(Path(reference).read_bytes()) for reference in references]


IDS = tuple(SampleId(0, k=k) for k in range(6))
PROMPT = Item("abc", (3, 4, 5), "", (), "main", {})
OLD_POLICY = ComputeStage(name="old", role="actor", outputs=("old_log_probs",))


def begin(path: str, folder: str, train: dict[str, int], gen: dict[str, int]) -> ActorWorker:
    size = dist.get_world_size()
    config = Config(
        model=ModelConfig(path=path, tiny=TINY),
        cluster=ClusterConfig(ranks=size, device=Device.cpu),
        data=DataConfig(max_prompt_tokens=8),
        trainer=TrainerConfig(layout=TrainLayoutConfig(**train)),
        rollout=RolloutConfig(max_new_tokens=12, layout=RolloutLayoutConfig(**gen)),
    )
    worker = ActorWorker(dist.get_rank(), size, config, path, Files(folder))
    with (
        mock.patch.object(dist, "init_process_group"),  # the fixture has made it
        mock.patch.dict(os.environ, MASTER_ADDR="localhost"),
    ):
        worker.setup(*worker.listen().value)
    return worker


def hand_over(worker: ActorWorker) -> None:
    """The first instance generates, parks with its KV cache; the last one resumes and scores."""
    generator = worker.actor.generator
    last = worker.size // (generator.parallel.pp * generator.parallel.tp)
    events: tuple[Parked, ...] = ()

    def advance(commands: list[Command], steps: int) -> Any:
        return worker.advance(generator.instance, commands, steps).value.event

    if generator.instance == 0:
        advance([Submit(IDS, PROMPT, Sampling(12))], 4)
        events = advance([Park(IDS, True)], 1).parked
    gathered: list[Any] = [None] * worker.size
    dist.all_gather_object(gathered, events)
    parked = [event for events_of_rank in gathered for event in events_of_rank]
    state = {place: share for event in parked for place, share in event.state.items()}
    if generator.instance == last - 1:
        first = parked[0]
        resumed = Parked(first.ids, first.tokens, first.version, state)
        advance([Resume(resumed.ids, resumed)], 100)
        own = [id for id in IDS if id in worker.store._samples]
        worker.scorers["actor"].compute(OLD_POLICY, own)


def live(path: str, folder: str, train: dict[str, int], gen: dict[str, int]) -> None:
    """Switch, generate, migrate, score, train, save, load, and switch again."""
    worker = begin(path, folder, train, gen)
    worker.enter(Phase.GENERATE)
    hand_over(worker)
    worker.release(IDS)
    worker.enter(Phase.TRAIN)
    engine = worker.actor.trainer.train_engine
    worker.residency.activate(engine)
    engine.log_probs(own_sequences())
    engine.update(own_sequences(), CrossEntropyLoss())
    worker.save_weights(f"{folder}/hf")
    progress = worker.save_state(f"{folder}/resume").value
    worker.load(f"{folder}/resume", progress)
    worker.enter(Phase.GENERATE)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("train", "gen"),
    [
        ({"fsdp": 2}, {"tp": 1}),
        pytest.param({"pp": 2, "tp": 2}, {"pp": 2}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 4}, {"tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "fsdp": 2}, {"tp": 4}, marks=pytest.mark.slow),
        pytest.param({"replicas": 2, "fsdp": 2}, {"tp": 1}, marks=pytest.mark.slow),
        pytest.param({"pp": 4}, {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"fsdp": 2, "tp": 2}, {"pp": 4}, marks=pytest.mark.slow),
        pytest.param({"pp": 4, "fsdp": 2}, {"pp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_ranks_life(
    ranks: Ranks, model: str, tmp_path: Path, train: dict[str, int], gen: dict[str, int]
) -> None:
    """Every group that tensors of the device use has been warmed up before."""
    size = torch.Size(train.values()).numel()
    _, logs = ranks.recorded(size, live, model, str(tmp_path), train, gen)
    faults = check(logs)
    assert not faults, "\n".join(map(str, faults))
    for log in logs:
        first: dict[str, Op] = {}
        for op in log:
            if isinstance(op, Op) and not op.host:
                first.setdefault(op.group, op)
        assert first
        for op in first.values():
            assert "warm_up" in op.site, str(op)
