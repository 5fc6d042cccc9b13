"""Roles whose numbers of optimizer steps differ, on gloo ranks: together, and each role alone.

The worker's own loop (`workers.training.train`) trains them. The k-th mini-batches are one plan,
what is left over is a reversed pipeline alone.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from small_engines import SIZES, make_engine, set_head
from surrogate_loss import Surrogate

from hybridrl.algorithms.critic import ValueLoss
from hybridrl.config import Config, Deterministic, RolloutConfig
from hybridrl.engines.train.fused_update import FusedUpdate
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import LOSS_MASK, SampleId
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.training import UpdateShare, UpdateSteps
from hybridrl.workers.training import train as train_steps

pytestmark = pytest.mark.long

STEPS = {"actor": (2, 1), "critic": (1, 4)}
"""Mini-batches and epochs: two steps and four."""


def stored(sequences):
    """This rank's samples with what both losses read."""
    rank, world = dist.get_rank(), dist.get_world_size()
    random, store, scalars = torch.Generator().manual_seed(11), SampleStore(), {}
    for number, sequence in enumerate(sequences):
        own = {
            "tokens": sequence.ids,
            "old_log_probs": sequence.fields["old_log_probs"],
            "returns": torch.rand(sequence.response_tokens, generator=random),
            "values": torch.rand(sequence.response_tokens, generator=random),
        }
        if sequence.mask is not None:
            own[LOSS_MASK] = sequence.mask
        if number % world == rank:
            id = SampleId(number, "", 0)
            store.add(id, StoredSample(sequence.response_tokens, None, own))
            scalars[id] = {"advantages": sequence.fields["advantages"]}
    return store, scalars


def steps_of(engine, role, store, scalars, config):
    """The role's update on this rank's samples."""
    (number, epochs), ids = STEPS[role], tuple(scalars)
    bounds = [len(ids) * i // number for i in range(number + 1)]
    batches = tuple(ids[bounds[i] : bounds[i + 1]] for i in range(number))
    loss = Surrogate() if role == "actor" else ValueLoss()
    return UpdateSteps(
        engine=engine,
        store=store,
        config=config,
        stage=UpdateStage(name=f"update_{role}", loss=loss, epochs=epochs, fields={}),
        share=UpdateShare(batches, scalars, dict.fromkeys(ids, 0), ()),
    )


def watch(engine):
    """Whole gradients by name of every step, of this rank's chunks."""
    steps = []

    def before_step(*_):
        named = (pair for chunk in engine.chunks for pair in chunk.named_parameters())
        steps.append({name: p.grad.full_tensor().clone() for name, p in named})

    engine.optimizer.register_step_pre_hook(before_step)
    return steps


def train(path, sequences, schedule, strict, fused):
    """Gradients of each step by role, weights at the end, metrics."""
    engines = {
        "actor": make_engine(path, (2, 1, 1, 1)),
        "critic": make_engine(path, (2, 1, 1, 1), values=True, reverse=fused, schedule=schedule),
    }
    set_head(engines["critic"])
    watched = [watch(engine) for engine in engines.values()]
    store, scalars = stored(sequences)
    config = Config(rollout=RolloutConfig(max_new_tokens=16))
    if strict:
        config.deterministic = Deterministic.strict
    updates = [steps_of(engine, role, store, scalars, config) for role, engine in engines.items()]
    if fused:
        metrics = train_steps(updates, FusedUpdate(list(engines.values())))
    else:
        metrics = [train_steps([update], None)[0] for update in updates]
    weights = [{name: w.clone() for name, w in e.weights()} for e in engines.values()]
    return watched, weights, metrics


@pytest.mark.parametrize(
    ("schedule", "strict"),
    [("one_f_one_b", False), ("one_f_one_b", True), ("interleaved", True), ("zero_bubble", True)],
)
def test_steps_that_differ_equal_those_of_roles_alone(ranks, tiny, sequences, schedule, strict):
    """Bit for bit where rows are those of separate updates (`deterministic=strict`)."""
    run = partial(ranks, 2, train, tiny("qwen3", **SIZES), sequences, schedule, strict)
    fused, separate = run(True), run(False)
    for number, role in enumerate(STEPS):
        assert (
            len(fused[0][0][number])
            == len(separate[0][0][number])
            == STEPS[role][0] * (STEPS[role][1])
        )
        for step, _ in enumerate(separate[0][0][number]):
            got, want = (
                {name: g for watched, *_ in run for name, g in watched[number][step].items()}
                for run in (fused, separate)
            )
            assert got.keys() == want.keys()
            assert step or all(gradient.any() for gradient in want.values())
            if strict:
                assert all(torch.equal(got[name], gradient) for name, gradient in want.items())
            elif step == 0:
                norm = torch.stack([g.norm() for g in want.values()]).norm()
                gap = torch.stack([(got[name] - g).norm() for name, g in want.items()]).norm()
                assert gap < 1e-6 * norm
        for name, weight in separate[0][1][number].items():
            other = fused[0][1][number][name]
            torch.testing.assert_close(other, weight, atol=0 if strict else 1e-5, rtol=0)
        own, alone = fused[0][2][number], separate[0][2][number]
        for name in ("loss", "grad_norm", "optimizer_steps", "tokens"):
            assert own[name] == pytest.approx(alone[name], rel=2e-5), name
