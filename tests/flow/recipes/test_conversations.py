"""What an environment wrote is not trained: every recipe, with NaN in all fields of such tokens.

The oracle is the same recipe on responses that have the model's tokens alone.
"""

import random
from typing import Any

import pytest
import torch

from hybridrl.flow.graph import GenerateStage, UpdateStage
from hybridrl.workers.roles import run_map
from hybridrl.workers.store import SampleStore, StoredSample

PROMPT_TOKENS = 3
NOW = {"actor": "new_log_probs", "critic": "new_values", "cost_critic": "new_cost_values"}


@pytest.fixture
def benches(bench, virtual_executor):
    """The oracle's bench, and one whose responses have an environment's tokens among them."""
    alone = bench

    class Executor(virtual_executor):
        """`map` as the ranks run it."""

        def _map(self, stage, sample, inputs):
            tensors = self.tensors[sample.id]
            store = SampleStore()
            store.add(sample.id, StoredSample(sample.response_tokens, None, dict(tensors)))
            scalars, names = run_map(stage, store, [sample.id], [sample.scalars])
            values = {name: value for name, (value,) in scalars.items()}
            return values | {name: store[sample.id].tensors[name] for name in names}

    class Conversations(type(bench)):
        def mask_of(self, id):
            own, draw = alone.length_of(id), random.Random(f"{id} replies")
            others = draw.randrange(6)
            # The last token is the model's: a conversation ends with a turn.
            mask = [True] * (own - 1) + [False] * others
            draw.shuffle(mask)
            return torch.tensor([*mask, True])

        def length_of(self, id):
            return len(self.mask_of(id))

        def field(self, id, name):
            if name == "trained":
                return self.mask_of(id)
            if name in ("turn_rewards", "turn_state"):
                return alone.field(id, name)
            if name == "turn":  # a reply is counted to the turn before it
                whole = torch.zeros(self.length_of(id), dtype=torch.int32)
                whole[self.mask_of(id)] = alone.field(id, name).int()
                return whole.cummax(0).values
            if name == "tokens":
                return torch.arange(PROMPT_TOKENS + self.length_of(id))
            value, mask = alone.field(id, name), self.mask_of(id)
            if not isinstance(value, torch.Tensor) or len(value) != int(mask.sum()):
                return value
            fill = float("nan") if value.is_floating_point() else -1
            whole = value.new_full((len(mask), *value.shape[1:]), fill)
            whole[mask] = value.detach()
            return whole

    bench = Conversations(Executor)
    bench.more_tensors = ("trained", *alone.more_tensors)
    bench.max_tokens = alone.max_tokens
    return alone, bench


def losses(bench, batch):
    """By update: the loss, its gradient at the model's tokens, and its metrics."""
    seen = []
    for name, read in batch.updates:
        stage = batch.graph.stages[name]
        assert isinstance(stage, UpdateStage)
        now_name = "new_candidate_log_probs" if stage.loss.candidates else NOW[stage.role]
        now = [bench.field(id, now_name).requires_grad_() for id, _ in read]
        loss = batch.loss_of(stage, read, now)
        masks = [bench.mask_of(id) for id, _ in read]
        gradients = torch.autograd.grad(loss, now)
        own = [g if mask is None else g[mask] for g, mask in zip(gradients, masks, strict=True)]
        others = [g[~mask] for g, mask in zip(gradients, masks, strict=True) if mask is not None]
        assert not any(g.any() for g in others), "a gradient at an environment's tokens"
        seen.append((name, [id for id, _ in read], loss, torch.cat(own), dict(batch.metrics)))
    return seen


SETTINGS: dict[str, list[dict[str, Any]]] = {
    "distill_topk": [{"top_k": 4}],
    "self_distill": [{"top_k": 4}],
    "grpo": [
        {},
        {"kl_coef": 0.1, "correction": {"old_log_probs": "trainer"}, "normalize": "sequence"},
        {"correction": {"old_log_probs": "trainer", "weights": "truncate"}},
        {
            "correction": {"old_log_probs": "trainer"},
            "baseline": "minimum_variance",
            "std_normalize": False,
        },
    ],
    "ppo": [
        {},
        {"kl_target": 0.1},
        {"correction": {"old_log_probs": "trainer", "weights": "mask"}},
    ],
}


@pytest.mark.long
def test_every_recipe_passes_over_what_an_environment_wrote(benches, recipe_names):
    alone, mixed = benches
    compared = 0
    for recipe in sorted(recipe_names):
        for keys in SETTINGS.get(recipe, [{}]):
            wanted = alone.run(recipe, **keys)
            if not any(isinstance(s, GenerateStage) for s in wanted.graph.stages.values()):
                break
            got = mixed.run(recipe, **keys)
            pairs = zip(losses(alone, wanted), losses(mixed, got), strict=True)
            for (name, ids, *numbers, metrics), (other, others, *values, metered) in pairs:
                assert (name, ids) == (other, others), recipe
                for x, y in zip(values, numbers, strict=True):
                    assert x.isfinite().all(), (recipe, keys, name)
                    torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9)
                for metric, y in metrics.items():
                    x = metered[metric].sort().values  # a row has its own order of sequences
                    torch.testing.assert_close(x, y.sort().values, rtol=1e-6, atol=1e-9)
            for x, y in zip(got.samples, wanted.samples, strict=True):
                assert x.id == y.id
                for field, scalar in y.scalars.items():
                    assert x.scalars[field] == pytest.approx(scalar), (recipe, keys, x.id, field)
                assert x.scalars.keys() == y.scalars.keys()
            compared += 1
    assert compared >= 24


@pytest.mark.parametrize(("recipe", "field"), [("ppo", "returns"), ("reinforce_pp", "to_go")])
def test_turn_rewards_come_where_they_were_earned(benches, recipe, field):
    """The reward to go of every token, with neither KL nor a critic's bias: summed by hand."""
    _, mixed = benches
    keys = {"kl_coef": 0.0, "turn_rewards": True, **({"lam": 1.0} if recipe == "ppo" else {})}
    batch = mixed.run(recipe, **keys)
    _, seen = batch.updates[0]
    raw: list[float] = []
    for sample in batch.samples:
        mask, turn = mixed.mask_of(sample.id), mixed.field(sample.id, "turn")
        earned = mixed.field(sample.id, "turn_rewards").tolist()
        own = [int(n) for n, by_model in zip(turn, mask, strict=True) if by_model]
        rest = sample.scalars["reward"] - sum(earned[n] for n in set(own))
        raw += [sum(earned[m] for m in set(own) if m >= n) + rest for n in own]
    if field == "returns":
        got = torch.cat([read["returns"][mixed.mask_of(id)] for id, read in seen])
        wanted = torch.tensor(raw)
    else:
        name = batch.graph.stages[batch.updates[0][0]].fields["advantages"]
        got = torch.cat([read[name][mixed.mask_of(id)] for id, read in seen])
        wanted = torch.tensor(raw)
        wanted = (wanted - wanted.mean()) / wanted.std()
    torch.testing.assert_close(got.float(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keys", [{}, {"turn_weight": 0.5, "gamma": 0.5, "std_normalize": False}])
def test_gigpo(bench, keys):
    """Sections 4.2 to 4.4: A_E + w A_S, the same for all tokens of a turn."""
    weight, gamma = keys.get("turn_weight", 1.0), keys.get("gamma", 0.95)

    def compared(values):
        x = torch.tensor(values, dtype=torch.float64)
        if len(set(values)) == 1:
            return [0.0] * len(values)
        x = x - x.mean()
        return (x / (x.std() + 1e-6) if keys.get("std_normalize", True) else x).tolist()

    responses = []
    for group in bench.groups(8):
        followed = {}
        for k, r in enumerate(group):
            earned = r.turn_rewards.tolist()
            earned[-1] += r.reward - sum(earned)
            for t, state in enumerate(r.turn_state.tolist()):
                left = sum(gamma ** (j - t) * x for j, x in enumerate(earned) if j >= t)
                followed.setdefault(state, {})[k, t] = left
        steps = {}
        for alike in followed.values():
            steps |= zip(alike, compared([*alike.values()]), strict=True)
        for k, (r, whole) in enumerate(
            zip(group, compared([r.reward for r in group]), strict=True)
        ):
            of_turns = [whole + weight * steps[k, t] for t in range(len(r.turn_rewards))]
            r.advantage = torch.tensor([of_turns[t] for t in r.turn.tolist()])
            responses.append(r)
    assert any(len({*r.advantage.tolist()}) > 1 for r in responses)
    terms = []
    for r in responses:
        ratio = (r.new_log_probs - r.log_probs).exp()
        terms.append(-torch.min(ratio * r.advantage, ratio.clamp(0.8, 1.2) * r.advantage))
    bench.run("gigpo", **keys).agrees(responses, torch.cat(terms).mean())
