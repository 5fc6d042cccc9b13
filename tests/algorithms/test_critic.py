"""Per-token rewards, GAE, whitening and the value loss against verl and plain float64."""

import pickle
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.algorithms.critic import (
    ValueLoss,
    discounted,
    gae,
    moments,
    token_rewards,
    turn_credit,
    whiten,
    whitening,
)
from hybridrl.algorithms.normalize import token_weights
from hybridrl.config import ConfigError

LENGTHS = (3, 7, 1, 0, 12, 5)
EXACT: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def drawn(seed: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[torch.Tensor, ...]:
    """A tensor [tokens] for each response, float64."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    return whole.split(lengths)


def masks(seed: int) -> tuple[torch.Tensor, ...]:
    """Some tokens of an environment; the first response has nothing but."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.rand(sum(LENGTHS), generator=generator) > 0.4
    whole[:3] = False
    return whole.split(LENGTHS)


def padded(parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


THERE = padded(torch.ones(sum(LENGTHS), dtype=torch.bool).split(LENGTHS))


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (0.9, 0.0)])
@pytest.mark.parametrize("masked", [False, True])
def test_gae_agrees_with_verl(
    core_algos: ModuleType, gamma: float, lam: float, masked: bool
) -> None:
    rewards, values = drawn(0), drawn(1)
    own = masks(2) if masked else THERE[THERE].split(LENGTHS)
    mask = padded(own)
    theirs, their_returns = core_algos.compute_gae_advantage_return(
        padded(rewards), padded(values), mask.double(), gamma, lam
    )
    results = [
        gae(r, v, gamma=gamma, lam=lam, mask=m)
        for r, v, m in zip(rewards, values, own, strict=True)
    ]
    advantages = torch.cat([a for a, _ in results])
    flat = torch.cat(own)
    torch.testing.assert_close(
        torch.cat([b for _, b in results])[flat], their_returns[mask], **EXACT
    )
    assert (advantages[~flat] == 0).all()
    # Whitened over the batch through scalars alone, as verl does over the padded tensor.
    parts = zip(advantages.split(LENGTHS), own, strict=True)
    means, scales = whitening(*zip(*(moments(a, m) for a, m in parts), strict=True))
    assert len(means) == len(LENGTHS)
    white = whiten(advantages, means[0], scales[0])
    # verl's masked mean adds 1e-8 to the number of tokens.
    torch.testing.assert_close(white[flat], theirs[mask], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("length", [0, 1, 2, 40])
def test_gae_agrees_with_its_sum(length: int) -> None:
    """A_t = sum_k (gamma lam)^k d_(t+k), written out; in float32 within its rounding."""
    (rewards,), (values,) = drawn(3, (length,)), drawn(4, (length,))
    gamma, lam = 0.97, 0.9
    after = torch.cat([values[1:], values.new_zeros(min(length, 1))])
    d = rewards + gamma * after - values
    expected = [
        sum((gamma * lam) ** k * d[t + k].item() for k in range(length - t)) for t in range(length)
    ]
    wanted = torch.tensor(expected, dtype=torch.float64)
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    torch.testing.assert_close(advantages, wanted, **EXACT)
    torch.testing.assert_close(returns, wanted + values, **EXACT)
    single = gae(rewards.float(), values.float(), gamma=gamma, lam=lam)
    assert single[0].dtype == single[1].dtype == torch.float32
    torch.testing.assert_close(single[0].double(), wanted, rtol=1e-6, atol=2e-6)


def test_a_mask_removes_tokens() -> None:
    """Stepped over: the policy's own tokens have what they would have without the others."""
    (rewards,), (values,) = drawn(5, (9,)), drawn(6, (9,))
    mask = torch.tensor([1, 1, 0, 0, 1, 0, 1, 1, 0], dtype=torch.bool)
    with_mask = gae(rewards, values, gamma=0.9, lam=0.8, mask=mask)
    without = gae(rewards[mask], values[mask], gamma=0.9, lam=0.8)
    torch.testing.assert_close(with_mask[0][mask], without[0], **EXACT)
    torch.testing.assert_close(with_mask[1][mask], without[1], **EXACT)
    torch.testing.assert_close(with_mask[1][~mask], values[~mask], **EXACT)


def test_reinforce_plus_plus_with_kl_agrees_with_verl(core_algos: ModuleType) -> None:
    log_probs, reference, rewards = drawn(7), drawn(8), drawn(9, (1,) * len(LENGTHS))
    results = [
        token_rewards(r.item(), p, q, 0.1)
        for r, p, q in zip(rewards, log_probs, reference, strict=True)
    ]
    theirs, their_returns = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        padded(tuple(results)), THERE.double(), SimpleNamespace(gamma=0.95)
    )
    to_go = [discounted(r, gamma=0.95) for r in results]
    torch.testing.assert_close(torch.cat(to_go), their_returns[THERE], **EXACT)
    means, scales = whitening(*zip(*map(moments, to_go), strict=True))
    white = torch.cat([whiten(x, means[0], scales[0]) for x in to_go])
    torch.testing.assert_close(white, theirs[THERE], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_token_rewards_agree_with_verl(core_algos: ModuleType, kl: str) -> None:
    """verl: scores at the last token, less the coefficient times its estimate (k3 up to 10)."""
    log_probs, rewards = drawn(10), drawn(12, (1,) * len(LENGTHS))
    reference = tuple(p + 0.5 * x for p, x in zip(log_probs, drawn(11), strict=True))
    scores = torch.zeros(THERE.shape, dtype=torch.float64)
    for row, (reward, length) in enumerate(zip(rewards, LENGTHS, strict=True)):
        if length:
            scores[row, length - 1] = reward
    penalty = core_algos.kl_penalty_forward(padded(log_probs), padded(reference), kl)
    per_response = [
        token_rewards(r.item(), p, q, kl_coef=0.3, kl=kl)
        for r, p, q in zip(rewards, log_probs, reference, strict=True)
    ]
    torch.testing.assert_close(torch.cat(per_response), (scores - 0.3 * penalty)[THERE], **EXACT)


def test_token_rewards_at_the_edges() -> None:
    p, q = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -2.0, -2.0])
    mask = torch.tensor([True, True, False])
    per_token = token_rewards(4.0, p, q, 0.5, mask=mask)
    torch.testing.assert_close(per_token, torch.tensor([-0.25, 4.0, 0.0]))
    assert token_rewards(4.0, p, q, 0.5, mask=~mask & mask).tolist() == [0, 0, 0]
    assert token_rewards(4.0, p[:0], q[:0], 0.5).tolist() == []
    cost = token_rewards(4.0, p, q, -0.5)
    torch.testing.assert_close(cost, torch.tensor([0.25, 0.0, 3.5]))
    function = pickle.loads(pickle.dumps(partial(token_rewards, kl_coef=0.5)))
    torch.testing.assert_close(function(4.0, p, q), torch.tensor([-0.25, 0.0, 4.5]))


@pytest.mark.parametrize("offset", [0.0, 1e7])
def test_whitening_by_scalars_is_that_of_all_tokens(offset: float) -> None:
    parts = [x + offset for x in drawn(15)]
    whole = torch.cat(parts)
    means, scales = whitening(*zip(*map(moments, parts), strict=True))
    wanted = (whole - whole.mean()) / (whole.var() + 1e-8).sqrt()
    torch.testing.assert_close(whiten(whole, means[0], scales[0]), wanted, rtol=1e-8, atol=1e-8)
    assert set(means) == {means[0]}
    assert set(scales) == {scales[0]}


def test_whitening_of_next_to_nothing() -> None:
    assert whitening([], [], []) == ([], [])
    assert whitening([0, 0], [0.0, 0.0], [0.0, 0.0]) == ([0.0, 0.0], [0.0, 0.0])
    means, scales = whitening([1, 0], [7.0, 0.0], [0.0, 0.0])
    assert whiten(torch.tensor([7.0]), means[0], scales[0]).tolist() == [0]
    equal = [torch.full((n,), 0.1) for n in (2, 5)]
    means, scales = whitening(*zip(*map(moments, equal), strict=True))
    assert [whiten(x, means[0], scales[0]).tolist() for x in equal] == [[0.0] * 2, [0.0] * 5]


@pytest.mark.parametrize("normalize", ["token", "sequence"])
@pytest.mark.parametrize("clip", [0.1, 0.5, 1e6])
def test_value_loss_agrees_with_verl(core_algos: ModuleType, clip: float, normalize: str) -> None:
    values, old, returns = (torch.cat(drawn(seed)) for seed in (16, 17, 18))
    mode = {"token": "token-mean", "sequence": "seq-mean-token-mean"}[normalize]
    leaf = values.clone().requires_grad_()
    expected, their_clipped = core_algos.compute_value_loss(
        padded(leaf.split(LENGTHS)),
        padded(returns.split(LENGTHS)),
        padded(old.split(LENGTHS)),
        THERE.double(),
        clip,
        mode,
    )
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    loss = pickle.loads(pickle.dumps(ValueLoss(clip=clip, normalize=normalize)))
    assert loss.fields == ("returns", "values")
    leaf = values.clone().requires_grad_()
    parts, metrics = loss(leaf, None, {"values": old, "returns": returns})
    used = [n for n in LENGTHS if n]
    weights = token_weights(LENGTHS, normalize, sum(used), len(used), max(LENGTHS)).double()
    total = (weights * parts).sum()
    (grad,) = torch.autograd.grad(total, leaf)
    # Our weights are float32: relative 6e-8.
    torch.testing.assert_close(total.detach(), expected.detach(), rtol=2e-7, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=2e-7, atol=1e-12)
    clipped = metrics["value_clip_fraction"].mean().item()
    assert clipped == pytest.approx(their_clipped.item(), abs=1e-8)
    assert (clipped > 0) == (clip < 1)


def test_value_loss_without_clipping() -> None:
    values = torch.tensor([1.0, -2.0, 1e6], requires_grad=True)
    returns = torch.tensor([0.5, 1.0, 0.0])
    loss = ValueLoss(clip=None)
    assert loss.fields == ("returns",)
    assert not loss.needs_entropy
    parts, metrics = loss(values, None, {"returns": returns})
    (grad,) = torch.autograd.grad(parts.sum(), values)
    torch.testing.assert_close(grad, (values - returns).detach())
    assert metrics.keys() == {"value", "value_error"}
    for clip in (0.0, -1.0):
        with pytest.raises(ConfigError, match=r"recipe\.value_clip"):
            ValueLoss(clip=clip)


def test_turns_earn_their_rewards_at_their_last_tokens() -> None:
    """Turns of 2, 1 and 3 tokens; the judge's reward has a half that no turn has earned."""
    turn = torch.tensor([0, 0, 1, 2, 2, 2], dtype=torch.int32)
    credit = turn_credit(2.25, turn, torch.tensor([1.0, -0.25, 1.0]))
    assert credit.tolist() == [0.0, 1.0, -0.25, 0.0, 0.0, 1.5]
    assert turn_credit(1.0, turn[:0], torch.zeros(0)).tolist() == []
    logs = torch.zeros(6)
    assert token_rewards(credit, logs, logs - 0.5, 0.1).tolist() == pytest.approx(
        [x - 0.05 for x in credit.tolist()]
    )
    # What is to come of it: of the whole response at its first token.
    assert discounted(token_rewards(credit, logs, logs))[0].item() == 2.25
