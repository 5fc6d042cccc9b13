"""Mismatch figures against plain Python in float64; correction weights against verl's."""

import math
import pickle
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.algorithms.corrections import (
    Correction,
    CorrectionLevel,
    CorrectionRule,
    StepScale,
    combine,
    compare,
    describe,
    response_ratio,
    step_scale,
)
from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.algorithms.normalize import token_weights
from hybridrl.config import ConfigError
from hybridrl.flow.graph import MapStage
from hybridrl.recipes.grpo import GRPOConfig, grpo
from hybridrl.recipes.rollout_correction import CorrectionConfig, OldLogProbs

RULES = [CorrectionRule.truncate, CorrectionRule.mask]
LENGTHS = (3, 7, 1, 0, 12, 5)
CLOSE = {"rtol": 1e-12, "atol": 0}


def drawn(spread: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [tokens] of trainer and rollout engine, float64."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    rollout = -torch.rand(total, generator=generator, dtype=torch.float64) * 3
    noise = torch.randn(total, generator=generator, dtype=torch.float64)
    return rollout + spread * noise, rollout


def plain(trainer: list[list[float]], rollout: list[list[float]]) -> dict[str, float]:
    """The figures, each by its definition, of responses token by token."""
    pairs = [list(zip(p, q, strict=True)) for p, q in zip(trainer, rollout, strict=True) if p]
    tokens = [p - q for response in pairs for p, q in response]
    w = [math.exp(d) for d in tokens]
    products = [math.prod(math.exp(p - q) for p, q in response) for response in pairs]

    def ess(weights: list[float]) -> float:
        return sum(weights) ** 2 / (len(weights) * sum(x * x for x in weights))

    return {
        "m/mean": sum(map(abs, tokens)) / len(tokens),
        "m/max": max(map(abs, tokens)),
        "m/kl": sum(x - 1 - math.log(x) for x in w) / len(w),
        "m/ess_token": ess(w),
        "m/ess_sequence": ess(products),
    }


@pytest.mark.parametrize("spread", [0.01, 0.7])
def test_figures_are_their_definitions_however_the_batch_is_cut(spread: float) -> None:
    trainer, rollout = drawn(spread)
    responses = [x.split(LENGTHS) for x in (trainer, rollout)]
    wanted = plain(*([x.tolist() for x in side] for side in responses))
    whole = compare(trainer, rollout, LENGTHS)
    metrics = describe(whole, "m")
    assert metrics == pytest.approx(wanted, rel=1e-9)
    assert list(metrics) == list(wanted)
    parts = [
        compare(torch.cat(responses[0][i:j]), torch.cat(responses[1][i:j]), LENGTHS[i:j])
        for i, j in ((0, 2), (2, 3), (3, 4), (4, 6))
    ]
    nothing = compare(torch.zeros(0), torch.zeros(0), ())
    torch.testing.assert_close(combine(torch.stack([*parts, nothing])), whole, **CLOSE)
    twice = torch.stack([*parts, nothing] * 2)  # by the ranks of a replica
    assert describe(combine(twice), "m") == pytest.approx(wanted, rel=1e-9)


def test_responses_of_no_rollout_engine_are_left_out() -> None:
    trainer, rollout = drawn(0.3)
    unknown = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    unknown[3:10] = True  # the second response
    trainer[5] = math.nan
    known = [n for i, n in enumerate(LENGTHS) if i != 1]
    wanted = compare(trainer[~unknown], rollout[~unknown], known)
    figures = compare(trainer, rollout.masked_fill(unknown, math.nan), LENGTHS)
    torch.testing.assert_close(figures, wanted, **CLOSE)
    assert describe(compare(trainer, torch.full_like(rollout, math.nan), LENGTHS), "m") == {}
    assert describe(compare(torch.zeros(0), torch.zeros(0), ()), "m") == {}


def test_figures_of_far_engines_stay_finite() -> None:
    """One token of the second response has all the weight; k3 clamps its exponent to 20."""
    trainer, rollout = torch.tensor([-1.0, -2.0, 0.0]), torch.tensor([-1.0, -2.0, -900.0])
    metrics = describe(compare(trainer, rollout, (2, 1)), "m")
    assert metrics["m/max"] == 900
    assert metrics["m/ess_token"] == pytest.approx(1 / 3)
    assert metrics["m/ess_sequence"] == pytest.approx(1 / 2)
    shifted = describe(compare(trainer - 500, trainer, (2, 1)), "m")
    assert shifted["m/ess_token"] == pytest.approx(1)  # where verl's clamp, too, makes them alike
    assert shifted["m/ess_sequence"] == pytest.approx(1 / 2)
    assert metrics["m/kl"] == pytest.approx((math.exp(20) - 21) / 3)


@pytest.fixture(scope="session")
def verl_weights(core_algos: ModuleType) -> Callable[..., torch.Tensor]:
    """verl's rollout correction weights."""
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

    def weights(*args: Any, **kwargs: Any) -> torch.Tensor:
        return compute_rollout_correction_weights(*args, **kwargs)[0]

    return weights


def padded(packed: torch.Tensor) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(packed.split(LENGTHS)), batch_first=True)


MASK = padded(torch.ones(sum(LENGTHS), dtype=torch.float64))


def ours(correction: Correction, trainer: torch.Tensor, rollout: torch.Tensor) -> torch.Tensor:
    """Weights [tokens] of packed responses."""
    parts = zip(trainer.split(LENGTHS), rollout.split(LENGTHS), strict=True)
    return torch.cat([correction(p, q) for p, q in parts])


@pytest.mark.parametrize("spread", [0.05, 0.5, 30.0])
@pytest.mark.parametrize("bound", [1.2, 5.0])
@pytest.mark.parametrize("level", CorrectionLevel)
@pytest.mark.parametrize("rule", RULES)
def test_weights_agree_with_verl(
    verl_weights: Callable[..., torch.Tensor],
    rule: CorrectionRule,
    level: CorrectionLevel,
    bound: float,
    spread: float,
) -> None:
    """verl has the same truncation, clamp and mask; its mask asks for both bounds."""
    trainer, rollout = drawn(spread, seed=3)
    trainer[10] = rollout[10]  # the third response: something is kept, as verl's metrics need
    correction = Correction(rule=rule, level=level, bound=bound)
    weights = ours(correction, trainer, rollout)
    threshold = bound if rule is CorrectionRule.truncate else f"{1 / bound!r}_{bound!r}"
    log_ratio = padded(trainer) - padded(rollout)
    wanted = verl_weights(log_ratio, MASK, rollout_is=level.value, rollout_is_threshold=threshold)
    # Ours are float32: relative 6e-8.
    torch.testing.assert_close(weights.double(), wanted[MASK > 0], rtol=1e-7, atol=0)
    assert not weights.requires_grad
    raw = log_ratio if level is CorrectionLevel.token else (log_ratio * MASK).sum(-1, keepdim=True)
    far = raw > math.log(bound)
    if rule is CorrectionRule.mask:
        far = far | (raw < -math.log(bound))
    assert torch.equal(correction.cut(weights), far.expand_as(MASK)[MASK > 0])
    if spread == 30:
        assert far.any()
        assert not far.all()
    if rule is CorrectionRule.truncate:
        assert weights.min() > 0  # by the clamp


def test_the_worked_example() -> None:
    rollout = torch.zeros(3)
    trainer = torch.tensor([0.4, 1.5, 3.0]).log()
    for rule, wanted in zip(RULES, ([0.4, 1.5, 2.0], [0.0, 1.5, 0.0]), strict=True):
        weights = Correction(rule=rule)(trainer, rollout)
        torch.testing.assert_close(weights, torch.tensor(wanted))
        whole = Correction(rule=rule, level=CorrectionLevel.sequence)(trainer, rollout)
        torch.testing.assert_close(whole, torch.full((3,), 1.8))


@pytest.mark.parametrize("level", CorrectionLevel)
@pytest.mark.parametrize("rule", RULES)
def test_gradient_of_the_corrected_loss(
    core_algos: ModuleType, rule: CorrectionRule, level: CorrectionLevel
) -> None:
    """Against the formula by autograd in float64, and against verl's loss with these weights.

    The weights multiply the policy term alone.
    """
    old, rollout = drawn(0.3, seed=4)
    generator = torch.Generator().manual_seed(5)
    new = old + 0.3 * torch.randn(len(old), generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(old), generator=generator, dtype=torch.float64)
    reference, entropy = old - 0.1, -new
    correction = Correction(rule=rule, level=level, bound=1.5)
    weights = ours(correction, old, rollout).double()
    assert 0 < correction.cut(weights).sum() < len(old)
    loss = ClippedLoss(correction=correction, kl_coef=0.1, entropy_coef=0.02)
    assert loss.fields[-1] == "rollout_weights"
    fields = {
        "advantages": advantages,
        "old_log_probs": old,
        "reference_log_probs": reference,
        "rollout_weights": weights,
    }
    leaf = new.clone().requires_grad_()
    values, metrics = loss(leaf, entropy, fields)
    used = [n for n in LENGTHS if n]
    share = token_weights(LENGTHS, "token", sum(used), len(used), max(LENGTHS)).double()
    (grad,) = torch.autograd.grad((share * values).sum(), leaf)

    leaf = new.clone().requires_grad_()
    ratio = (leaf - old).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = (reference - leaf).exp() - (reference - leaf) - 1
    wanted = (weights * policy + 0.1 * kl - 0.02 * entropy).mean()
    (wanted_grad,) = torch.autograd.grad(wanted, leaf)
    torch.testing.assert_close((share * values).sum().detach(), wanted.detach(), rtol=2e-7, atol=0)
    torch.testing.assert_close(grad, wanted_grad, rtol=2e-7, atol=1e-12)
    assert metrics["correction_weight"].mean() == pytest.approx(weights.mean().item())
    assert metrics["correction_cut"].mean() == pytest.approx(
        correction.cut(weights).double().mean().item()
    )

    leaf = new.clone().requires_grad_()
    config = SimpleNamespace(
        clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={},
        get=lambda name, default: 1e9,
    )  # fmt: skip
    theirs, _ = core_algos.compute_policy_loss_vanilla(
        old_log_prob=padded(old),
        log_prob=padded(leaf),
        advantages=padded(advantages),
        response_mask=MASK,
        loss_agg_mode="token-mean",
        config=config,
        rollout_is_weights=padded(weights),
    )
    plain_loss = ClippedLoss(correction=correction)
    mine = (share * plain_loss(leaf, None, fields)[0]).sum()
    torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=2e-7, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(mine, leaf)[0],
        torch.autograd.grad(theirs, leaf)[0],
        rtol=2e-7,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bound": 1.0}, r"recipe\.correction\.bound=1.0: wanted a number above 1"),
        ({"bound": math.nan}, r"recipe\.correction\.bound=nan: wanted a number above 1"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Correction(**settings)


def test_a_correction_needs_the_trainers_log_probs() -> None:
    with pytest.raises(
        ConfigError, match=r"correction\.weights=mask: .*correction\.old_log_probs=trainer"
    ):
        grpo.build(GRPOConfig(correction=CorrectionConfig(weights=CorrectionRule.mask)))


def test_grpo_makes_the_weights_per_sample_before_the_update() -> None:
    settings = CorrectionConfig(
        old_log_probs=OldLogProbs.trainer,
        weights=CorrectionRule.truncate,
        level=CorrectionLevel.sequence,
        bound=3.0,
    )
    graph = grpo.build(GRPOConfig(correction=settings))
    stage = graph.stages["correction"]
    assert isinstance(stage, MapStage)
    assert stage.inputs == ("old_log_probs", "log_probs")
    function = pickle.loads(pickle.dumps(stage.function))
    assert function == Correction(level=CorrectionLevel.sequence, bound=3.0)
    assert "rollout_weights" in graph.stages["update_actor"].inputs
    without = CorrectionConfig(old_log_probs=OldLogProbs.trainer)
    assert "correction" not in grpo.build(GRPOConfig(correction=without)).stages


def test_the_ratio_of_a_response_is_the_product_of_its_tokens() -> None:
    trainer, rollout = drawn(0.3)
    for p, q in zip(trainer.split(LENGTHS), rollout.split(LENGTHS), strict=True):
        expected = math.prod(math.exp(x - y) for x, y in zip(p.tolist(), q.tolist(), strict=True))
        assert response_ratio(p, q) == pytest.approx(expected)
    far = torch.full((10,), -300.0)
    assert response_ratio(far, -far) == pytest.approx(math.exp(-20))
    assert response_ratio(-far, far) == pytest.approx(math.exp(20))


def test_step_scale_follows_the_effective_sample_size() -> None:
    """Against VCPO's formula; nothing scales up, and what has no sample left does not step."""
    for ess in (0.0, 1e-9, 0.04, 0.5, 0.9, 1.0, 1.0000001):
        for reference in (0.25, 0.9, 1.0):
            share = min(1.0, ess / reference)
            assert step_scale(ess, reference=reference) == pytest.approx(math.sqrt(share))
            linear = step_scale(ess, reference=reference, rule=StepScale.linear)
            assert linear == pytest.approx(share)
    # As the engine reports it: of four responses, one has all the weight.
    trainer = torch.tensor([0.0, -40.0, -40.0, -40.0], dtype=torch.float64)
    figures = compare(trainer, torch.zeros(4, dtype=torch.float64), [1] * 4)
    ess = describe(figures, "mismatch")["mismatch/ess_sequence"]
    assert step_scale(ess) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"reference": 0.0}, "recipe.step_scale_reference=0.0: wanted above 0"),
        ({"reference": 1.5}, "recipe.step_scale_reference=1.5: wanted above 0"),
    ],
)
def test_a_wrong_step_scale_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        step_scale(0.5, **settings)
