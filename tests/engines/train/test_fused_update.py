"""Updates in one plan against separate updates: parameters and metrics."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from dtensor_layouts import layout_of
from small_engines import SIZES, make_engine, set_head
from surrogate_loss import Surrogate

from hybridrl.algorithms.critic import ValueLoss
from hybridrl.engines.train.fused_update import FusedUpdate, UpdateInputs
from hybridrl.layout import fsdp_groups
from hybridrl.pipelines.evaluation import evaluate
from hybridrl.pipelines.problem import PipelineProblem
from hybridrl.pipelines.search import ELITE
from hybridrl.pipelines.standard import standard_plan


def value_sequences(sequences):
    """Sequences with a critic's fields."""
    random = torch.Generator().manual_seed(11)
    for sequence in sequences:
        size = (sequence.response_tokens,)
        sequence.fields["returns"] = torch.rand(size, generator=random)
        sequence.fields["values"] = torch.rand(size, generator=random)
    return sequences


def watch(engine):
    """Whole gradients by name, of this rank's chunks, filled before each step."""
    gradients = {}

    def before_step(*_):
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                if p.requires_grad:
                    gradients[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    return gradients


def train(path, sequences, actor, critic, fused, settings):
    """Two updates of an actor and critics; gradients of the first one, metrics, weights after."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = value_sequences(sequences)[rank::world]
    lora, schedule = settings.get("lora", 0), settings.get("schedule", "one_f_one_b")
    engines = [make_engine(path, actor, schedule=schedule, lora=lora)]
    for number in range(settings.get("critics", 1)):
        reverse = fused and settings.get("reverse", True) and number == 0
        engines.append(make_engine(path, critic, values=True, reverse=reverse, lora=lora))
        set_head(engines[-1])
    for engine in engines:  # that checkpoints and the weight switch read
        shards = engine.named_shards()
        for name in shards:
            boxes = engine.layout.local(name, rank)
            assert boxes == layout_of(shards).local(name, rank), name
    together = FusedUpdate(engines) if fused else None
    watched = [watch(engine) for engine in engines]
    losses = [Surrogate(), *[ValueLoss()] * (len(engines) - 1)]
    first, metrics = [], []
    for step in range(2):
        if together is not None:
            inputs = [UpdateInputs(sequences=mine, loss=loss) for loss in losses]
            pairs = list(zip(engines, inputs, strict=True))
            metrics.append(together.update(pairs, even=settings["even"]))
        else:
            pairs = zip(engines, losses, strict=True)
            metrics.append([engine.update(mine, loss) for engine, loss in pairs])
        if step == 0:
            first = [dict(gradients) for gradients in watched]
    weights = [{name: w.clone() for name, w in engine.weights()} for engine in engines]
    return first, metrics, weights


def train_each(path, sequences, actor, critic, settings):
    """Separate updates, a plan of their rows, one of its own: DTensor learns shapes once."""
    plans = [(False, settings), *((True, {**settings, "even": even}) for even in (True, False))]
    return [train(path, sequences, actor, critic, *plan) for plan in plans]


def union(results, number):
    """The gradients of engine `number` on all ranks."""
    return {name: grad for first, _, _ in results for name, grad in first[number].items()}


def compare(fused, separate, *, even):
    """Measured: gradients of other rows differ by at most 4e-7 of their norm."""
    for number in range(len(fused[0][0])):
        got, want = union(fused, number), union(separate, number)
        assert got.keys() == want.keys()
        # B is zero at first, so A has no gradient.
        assert all(g.any() for name, g in want.items() if "lora_A" not in name)
        if even:
            for name, gradient in want.items():
                assert torch.equal(got[name], gradient), name
        norm = torch.stack([g.norm() for g in want.values()]).norm()
        gap = torch.stack([(got[name] - g).norm() for name, g in want.items()]).norm()
        assert norm > 1e-3
        assert gap < 1e-6 * norm
        for name, weight in separate[0][2][number].items():
            other = fused[0][2][number][name]
            torch.testing.assert_close(other, weight, atol=1e-5, rtol=0)
    # Each call rounds its operations to thousands.
    apart = () if even else ("flops",)
    for own, other in zip(fused[0][1], separate[0][1], strict=True):
        for metrics, wanted in zip(own, other, strict=True):
            assert metrics.keys() == wanted.keys()
            for name in metrics.keys() - set(apart):
                assert metrics[name] == pytest.approx(wanted[name], rel=2e-5, abs=1e-6), name


def check(ranks: Callable, world, path, sequences, actor, critic, **settings):
    results = ranks(world, train_each, path, sequences, actor, critic, settings)
    separate, *fused = zip(*results, strict=True)
    for even, updates in zip((True, False), fused, strict=True):
        compare(updates, separate, even=even)


@pytest.fixture(scope="module")
def path(tiny: Callable[..., str]) -> str:
    """A tied Qwen3 of four layers."""
    return tiny("qwen3", **SIZES)


@pytest.mark.layouts
def test_two_ranks_in_both_directions(ranks, path, sequences):
    check(ranks, 2, path, sequences, (2, 1, 1, 1), (2, 1, 1, 1))


@pytest.mark.layouts
@pytest.mark.parametrize(
    "critic", [pytest.param((1, 1, 2, 1), marks=pytest.mark.wide), (2, 1, 1, 1)], ids=str
)
def test_adapters(ranks, path, sequences, critic):
    """One critic is sharded by FSDP, and the pipeline of another runs the other way."""
    check(ranks, 2, path, sequences, (2, 1, 1, 1), critic, lora=2)


def planned_updates(path, sequences):
    """Five updates; the problem and plan of the last, and how many policies are kept."""
    mine = value_sequences(sequences)[dist.get_rank() :: 2]
    layout = (2, 1, 1, 1)
    actor = make_engine(path, layout)
    critic = make_engine(path, layout, values=True, reverse=True)
    recorded, kept = [], []

    def plan(problem):
        recorded[:] = [problem, together._search(problem)]
        return recorded[1]

    together = FusedUpdate([actor, critic], plan)
    losses = {actor: Surrogate(), critic: ValueLoss()}
    pairs = [(one, UpdateInputs(sequences=mine, loss=loss)) for one, loss in losses.items()]
    for _ in range(5):
        together.update(pairs)
        kept.append(len(together._policies))
    return recorded, kept


@pytest.mark.long
def test_a_searched_plan_interleaves_the_models(ranks, path, sequences):
    """Two equal models run in both directions, and only the rank that searches keeps policies."""
    (recorded, kept), (others, others_kept) = ranks(2, planned_updates, path, sequences)
    problem, plan = recorded
    assert not others
    alone = 0.0
    for model in problem.models:
        own = PipelineProblem(models=[model], num_ranks=2, send_s=problem.send_s)
        alone += evaluate(own, standard_plan(model, "one_f_one_b")).seconds
    assert evaluate(problem, plan).seconds < 0.95 * alone
    for actions in plan:
        models = [action.model for action in actions]
        assert sum(a != b for a, b in itertools.pairwise(models)) > 1
    assert max(kept) <= ELITE
    assert others_kept == [0] * 5


OF_FOUR = [
    ((4, 1, 1, 1), (2, 2, 1, 1), {}),
    ((4, 1, 1, 1), (2, 1, 2, 1), {"reverse": False}),
    ((2, 1, 2, 1), (2, 1, 2, 1), {"critics": 2}),
    ((2, 2, 1, 1), (1, 1, 4, 1), {}),
    ((2, 1, 1, 2), (2, 1, 1, 2), {}),
    ((2, 1, 2, 1), (4, 1, 1, 1), {"schedule": "interleaved"}),
]


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("actor", "critic", "settings"),
    [
        *(pytest.param(*case, marks=pytest.mark.wide) for case in OF_FOUR),
        ((2, 1, 2, 1), (4, 1, 1, 1), {"schedule": "zero_bubble"}),
    ],
    ids=str,
)
def test_four_ranks(ranks, path, sequences, actor, critic, settings):
    check(ranks, 4, path, sequences, actor, critic, **settings)


def train_each_by_layer(*args):
    """`train_each` with a group of FSDP for each layer."""
    fsdp_groups.ONE_GROUP_PARAMETERS = 0
    return train_each(*args)


@pytest.mark.layouts
def test_groups_of_layers(fresh_ranks, path, sequences):
    layout = (2, 1, 2, 1)
    results = fresh_ranks(4, train_each_by_layer, path, sequences, layout, layout, {})
    separate, together, _ = zip(*results, strict=True)
    compare(together, separate, even=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("actor", "critic"),
    [
        ((4, 1, 2, 1), (2, 2, 2, 1)),
        ((2, 2, 2, 1), (4, 1, 2, 1)),
        ((4, 1, 1, 2), (2, 1, 2, 2)),
    ],
    ids=str,
)
def test_eight_ranks(ranks, path, sequences, actor, critic):
    check(ranks, 8, path, sequences, actor, critic)
