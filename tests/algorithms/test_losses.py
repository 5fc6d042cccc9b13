"""Losses on packed ragged tensors against verl's padded ones and the formula in float64."""

import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.algorithms.corrections import Correction
from hybridrl.algorithms.losses import (
    CISPOLoss,
    ClippedLoss,
    CrossEntropyLoss,
    PolicyLoss,
    ReinforceLoss,
    SAPOLoss,
)
from hybridrl.algorithms.normalize import token_weights
from hybridrl.config import ConfigError

LENGTHS = (3, 7, 1, 0, 12, 5)
CLOSE: dict[str, Any] = {"rtol": 2e-7, "atol": 1e-9}
"""Our weights are float32: relative 6e-8."""
VERL_MODES = {
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


class Batch:
    """Random policy-gradient inputs of sequences of `lengths`, packed and padded, float64."""

    def __init__(self, lengths: tuple[int, ...], spread: float = 0.5, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.lengths = lengths
        self.width = max(*lengths, 1)
        self.mask = torch.arange(self.width) < torch.tensor(lengths)[:, None]
        self.log_probs = -draw(len(lengths), self.width).abs()
        self.old = self.log_probs + spread * draw(len(lengths), self.width)
        self.reference = self.log_probs + 0.3 * draw(len(lengths), self.width)
        self.entropy = draw(len(lengths), self.width).abs()
        self.advantages = draw(len(lengths), 1).expand(-1, self.width).contiguous()
        self.behavior = self.old + spread * draw(len(lengths), self.width)
        self.weights = draw(len(lengths), self.width).exp()

    def ours(self, loss: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Batch loss, its gradient [sequences, width], metrics averaged over the tokens."""
        leaf = self.log_probs.clone().requires_grad_()
        fields = {
            "advantages": self.advantages[self.mask],
            "old_log_probs": self.old[self.mask],
            "reference_log_probs": self.reference[self.mask],
            "rollout_weights": self.weights[self.mask],
        }
        values, metrics = loss(
            leaf[self.mask], self.entropy[self.mask], {name: fields[name] for name in loss.fields}
        )
        used = [n for n in self.lengths if n]
        weights = token_weights(self.lengths, loss.normalize, sum(used), len(used), self.width)
        total = (weights.double() * values).sum()
        (grad,) = torch.autograd.grad(total, leaf)
        return total.detach(), grad, {name: value.mean() for name, value in metrics.items()}

    def verl(
        self, function: Any, loss: Any, **settings: Any
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        """verl's batch loss, its gradient and its metrics, under the same normalization."""
        from verl.workers.config import ActorConfig

        config = ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            **settings.pop("config", {}),
        )
        leaf = self.log_probs.clone().requires_grad_()
        names = {"old_log_prob": self.old, "log_prob": leaf, "advantages": self.advantages}
        total, metrics = function(
            **names | settings,
            response_mask=self.mask.double(),
            loss_agg_mode=VERL_MODES[loss.normalize],
            config=config,
        )
        (grad,) = torch.autograd.grad(total, leaf)
        return total.detach(), grad, metrics


@pytest.mark.parametrize("normalize", sorted(VERL_MODES))
@pytest.mark.parametrize(("clip_high", "dual_clip"), [(0.2, 3.0), (0.28, 1.5)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 15.0])
def test_clipped_loss_agrees_with_verl(
    core_algos: ModuleType, normalize: str, clip_high: float, dual_clip: float, spread: float
) -> None:
    batch = Batch(LENGTHS, spread)
    leaf = batch.log_probs.clone().requires_grad_()
    config = _VerlConfig(clip_high, dual_clip)
    expected, theirs = core_algos.compute_policy_loss_vanilla(
        old_log_prob=batch.old,
        log_prob=leaf,
        advantages=batch.advantages,
        response_mask=batch.mask.double(),
        loss_agg_mode=VERL_MODES[normalize],
        config=config,
    )
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = batch.ours(
        ClippedLoss(clip_high=clip_high, dual_clip=dual_clip, normalize=normalize)
    )
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    clipped = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    assert clipped.item() == pytest.approx(theirs["actor/pg_clipfrac"], abs=1e-6)
    dual = metrics["clip_fraction_dual"].item()
    assert dual == pytest.approx(theirs["actor/pg_clipfrac_lower"], abs=1e-6)
    if spread:
        assert clipped > 0


@pytest.mark.parametrize("dual_clip", [None, 2.0])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("normalize", sorted(VERL_MODES))
def test_clipped_loss_agrees_with_the_formula(
    dual_clip: float | None, kl: str, normalize: str
) -> None:
    batch = Batch(LENGTHS, seed=1)
    batch.advantages[1] = 0.0
    loss = ClippedLoss(
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=dual_clip,
        kl_coef=0.07,
        kl=kl,
        entropy_coef=0.01,
        normalize=normalize,
    )
    assert loss.fields == ("advantages", "old_log_probs", "reference_log_probs")
    assert loss.needs_entropy
    total, grad, _ = batch.ours(loss)
    leaf = batch.log_probs.clone().requires_grad_()
    expected = _formula(leaf, batch, loss)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)


def test_sequence_normalization_without_clipping_is_the_group_mean_of_trl() -> None:
    """On the first update (old = new) GRPO's loss is minus the mean advantage, its gradient
    minus advantage over length: what TRL computes for loss_type="grpo" (arXiv 2402.03300, eq. 3).
    """
    batch = Batch((4, 2, 9), spread=0.0)
    total, grad, metrics = batch.ours(ClippedLoss(normalize="sequence"))
    torch.testing.assert_close(total, -batch.advantages[:, 0].mean(), rtol=1e-6, atol=0.0)
    lengths = torch.tensor(batch.lengths)[:, None]
    expected = torch.where(batch.mask, -batch.advantages / lengths / 3, 0.0)
    torch.testing.assert_close(grad, expected, rtol=2e-7, atol=0.0)
    assert metrics["ratio"] == 1
    assert metrics["approx_kl"] == 0


def test_all_masked_is_zero_with_zero_gradient() -> None:
    batch = Batch((0, 0))
    for normalize in VERL_MODES:
        total, grad, _ = batch.ours(ClippedLoss(normalize=normalize, kl_coef=0.1))
        assert total == 0
        assert torch.equal(grad, torch.zeros_like(grad))


def test_extreme_ratios_stay_finite_and_bounded() -> None:
    new = torch.tensor([0.0, -300.0, 0.0, -300.0], requires_grad=True)
    old = torch.tensor([-300.0, 0.0, -300.0, 0.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    fields = {"advantages": advantages, "old_log_probs": old}
    loss, metrics = ClippedLoss(dual_clip=3.0)(new, None, fields)
    (grad,) = torch.autograd.grad(loss.sum(), new)
    torch.testing.assert_close(loss, torch.tensor([-1.2, 0.0, 3.0, 0.8]), rtol=1e-6, atol=1e-8)
    assert torch.equal(grad, torch.zeros(4))
    assert all(torch.isfinite(value).all() for value in metrics.values())
    assert metrics["clip_fraction_high"].tolist() == [1, 0, 0, 0]
    assert metrics["clip_fraction_low"].tolist() == [0, 0, 0, 1]
    assert metrics["clip_fraction_dual"].tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("normalize", sorted(VERL_MODES))
@pytest.mark.parametrize("bound", [1.5, 1e9])
@pytest.mark.parametrize("spread", [0.5, 15.0])
def test_decoupled_ppo_agrees_with_verl(
    core_algos: ModuleType, normalize: str, bound: float, spread: float
) -> None:
    """verl's clipped loss around its old policy, weighted by old over behavior."""
    batch = Batch(LENGTHS, spread, seed=2)
    correction = Correction(bound=bound)
    batch.weights = correction(batch.old, batch.behavior).double()
    loss = ClippedLoss(clip_high=0.3, correction=correction, normalize=normalize)
    weights = (batch.old - batch.behavior).clamp(-20, 20).exp()
    expected, expected_grad, theirs = batch.verl(
        core_algos.compute_policy_loss_vanilla,
        loss,
        config={"clip_ratio_low": 0.2, "clip_ratio_high": 0.3, "clip_ratio_c": 1e9},
        rollout_is_weights=weights.clamp(max=bound),
    )
    total, grad, metrics = batch.ours(loss)
    torch.testing.assert_close(total, expected, **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    clipped = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    assert clipped.item() == pytest.approx(theirs["actor/pg_clipfrac"], abs=1e-6)
    cut = weights[batch.mask] > bound
    assert metrics["correction_cut"] == cut.double().mean()
    assert (cut.any().item(), cut.all().item()) == (bound < 2, False)


@pytest.mark.parametrize("normalize", sorted(VERL_MODES))
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.3), (1.0, 4.0)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 15.0])
def test_cispo_agrees_with_verl(
    core_algos: ModuleType, normalize: str, low: float, high: float, spread: float
) -> None:
    batch = Batch(LENGTHS, spread, seed=4)
    loss = CISPOLoss(clip_low=low, clip_high=high, normalize=normalize)
    config = {"clip_ratio_low": low, "clip_ratio_high": high}
    expected, expected_grad, theirs = batch.verl(
        core_algos.compute_policy_loss_cispo, loss, config=config
    )
    total, grad, metrics = batch.ours(loss)
    torch.testing.assert_close(total, expected, **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    clipped = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    assert clipped.item() == pytest.approx(theirs["actor/pg_clipfrac"], abs=1e-6)
    if spread == 15:
        # Clipped tokens have a gradient still, where the clipped surrogate has none.
        high_only = batch.mask & (batch.log_probs - batch.old > 2)
        assert high_only.any()
        assert (grad[high_only] != 0).all()


@pytest.mark.parametrize("normalize", sorted(VERL_MODES))
@pytest.mark.parametrize("corrected", [False, True])
def test_reinforce_agrees_with_verl(
    core_algos: ModuleType, normalize: str, corrected: bool
) -> None:
    batch = Batch(LENGTHS, seed=5)
    loss = ReinforceLoss(normalize=normalize, correction=Correction() if corrected else None)
    leaf = batch.log_probs.clone().requires_grad_()
    expected, _ = core_algos.compute_policy_loss_reinforce(
        batch.old,
        leaf,
        batch.advantages,
        batch.mask.double(),
        VERL_MODES[normalize],
        SimpleNamespace(global_batch_info={}),
        batch.weights if corrected else None,
    )
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, _ = batch.ours(loss)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)


@pytest.mark.parametrize("taus", [(1.0, 1.05), (0.5, 3.0)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 15.0])
def test_sapo_agrees_with_verl(
    core_algos: ModuleType, taus: tuple[float, float], spread: float
) -> None:
    """Its weights are always those of `sequence`."""
    batch = Batch(LENGTHS, spread, seed=7)
    loss = SAPOLoss(tau_pos=taus[0], tau_neg=taus[1])
    config = {"tau_pos": taus[0], "tau_neg": taus[1]}
    expected, expected_grad, _ = batch.verl(
        core_algos.compute_policy_loss_sapo, loss, config=config
    )
    total, grad, metrics = batch.ours(loss)
    torch.testing.assert_close(total, expected, **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    assert (metrics["gate"] == 1) == (spread == 0)


def test_sapo_is_the_policy_gradient_times_its_gate() -> None:
    batch = Batch((9,), seed=8)
    loss = SAPOLoss(tau_pos=2.0, tau_neg=0.7, normalize="token")
    _, grad, metrics = batch.ours(loss)
    ratio = (batch.log_probs - batch.old).exp()
    tau = 2.0 if batch.advantages[0, 0] > 0 else 0.7
    gate = 1 / torch.cosh(tau / 2 * (ratio - 1)) ** 2
    torch.testing.assert_close(grad, -gate * ratio * batch.advantages / 9, **CLOSE)
    torch.testing.assert_close(metrics["gate"], gate.mean())


@pytest.mark.parametrize("loss_class", [CISPOLoss, ReinforceLoss, SAPOLoss])
def test_kl_and_entropy_are_added_to_every_surrogate(loss_class: type[PolicyLoss]) -> None:
    batch = Batch(LENGTHS, seed=6)
    bare = loss_class(normalize="token")
    whole = loss_class(normalize="token", kl="k2", kl_coef=0.3, entropy_coef=0.02)
    assert (bare.needs_entropy, whole.needs_entropy) == (False, True)
    total, grad, metrics = batch.ours(whole)
    without, without_grad, _ = batch.ours(bare)
    difference = batch.log_probs - batch.reference
    added = 0.15 * difference**2 - 0.02 * batch.entropy
    torch.testing.assert_close(total - without, added[batch.mask].mean(), **CLOSE)
    expected = torch.where(batch.mask, 0.3 * difference, 0.0) / batch.mask.sum()
    torch.testing.assert_close(grad - without_grad, expected, rtol=1e-6, atol=1e-9)
    assert metrics["kl"] == pytest.approx((difference**2 / 2)[batch.mask].mean().item())


@pytest.mark.parametrize("loss_class", [CISPOLoss, ReinforceLoss, SAPOLoss])
def test_other_losses_without_a_token_are_zero(loss_class: type[PolicyLoss]) -> None:
    total, grad, _ = Batch((0, 0)).ours(loss_class(kl_coef=0.1))
    assert total == 0
    assert torch.equal(grad, torch.zeros_like(grad))


def test_extreme_weights_stay_finite_and_bounded() -> None:
    new = torch.tensor([0.0, -300.0, 0.0, -300.0], requires_grad=True)
    old = torch.tensor([-300.0, 0.0, -300.0, 0.0])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0])
    for loss, expected in (
        (CISPOLoss(), [-5.0, 0.0, 5.0, 0.0]),
        (CISPOLoss(clip_low=0.2, clip_high=0.2), [-1.2, -0.8, 1.2, 0.8]),
        (SAPOLoss(), [0.0, 0.0, 0.0, 0.0]),
    ):
        values, metrics = loss(new, None, {"advantages": advantages, "old_log_probs": old})
        (grad,) = torch.autograd.grad(values.sum(), new)
        torch.testing.assert_close(grad, torch.tensor(expected), rtol=1e-6, atol=1e-8)
        assert all(torch.isfinite(value).all() for value in metrics.values())


def test_cross_entropy_agrees_with_torch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(9, 17, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(17, (9,))
    loss = CrossEntropyLoss()
    assert loss.fields == ()
    values, _ = loss(logits.log_softmax(-1)[torch.arange(9), targets], None, {})
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(
        torch.autograd.grad(values.sum(), logits), torch.autograd.grad(expected.sum(), logits)
    )


def test_losses_are_pickled_whole() -> None:
    losses = (CISPOLoss(), SAPOLoss(), ReinforceLoss(), CrossEntropyLoss())
    for loss in (ClippedLoss(dual_clip=3.0, kl_coef=0.1, kl="k2"), *losses):
        assert pickle.loads(pickle.dumps(loss)) == loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": "k4"}, r"recipe\.kl=k4: wanted one of k1, k2, k3"),
        ({"normalize": "mean"}, r"recipe\.normalize=mean: wanted one of token, sequence, constant"),
        ({"dual_clip": 0.9}, r"recipe\.dual_clip=0.9: wanted above 1"),
        ({"clip_low": 1.5}, r"recipe\.clip_low=1.5: wanted 0 to 1"),
        ({"clip_high": -0.1}, r"recipe\.clip_high=-0.1: wanted 0 or more"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClippedLoss(**settings)


@pytest.mark.parametrize(
    ("loss_class", "settings", "message"),
    [
        (CISPOLoss, {"clip_low": -0.1}, r"recipe\.clip_low=-0.1: wanted 0 to 1"),
        (SAPOLoss, {"tau_neg": 0.0}, r"recipe\.tau_neg=0.0: wanted above 0"),
        (ReinforceLoss, {"kl": "k9"}, r"recipe\.kl=k9: wanted one of k1, k2, k3"),
    ],
)
def test_a_wrong_setting_of_another_loss_is_named(
    loss_class: type[PolicyLoss], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_class(**settings)


class _VerlConfig(SimpleNamespace):
    """What verl's loss reads of its actor config."""

    def __init__(self, clip_high: float, dual_clip: float) -> None:
        super().__init__(
            clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=clip_high, global_batch_info={}
        )
        self.dual_clip = dual_clip

    def get(self, name: str, default: float) -> float:
        assert name == "clip_ratio_c"
        return self.dual_clip


def _formula(leaf: torch.Tensor, batch: Batch, loss: ClippedLoss) -> torch.Tensor:
    """The batch loss, written out token by token."""
    per_sequence = []
    for i, length in enumerate(batch.lengths):
        terms = []
        for t in range(length):
            a, p, q = batch.advantages[i, t], leaf[i, t], batch.reference[i, t]
            r = torch.exp(p - batch.old[i, t])
            clipped = min(max(r, torch.tensor(1 - loss.clip_low)), torch.tensor(1 + loss.clip_high))
            objective = min(r * a, clipped * a)
            if loss.dual_clip is not None and a < 0:
                objective = max(objective, loss.dual_clip * a)
            kl = {
                "k1": p - q,
                "k2": (p - q) ** 2 / 2,
                "k3": torch.exp(q - p) - (q - p) - 1,
            }[loss.kl]
            terms.append(-objective + loss.kl_coef * kl - loss.entropy_coef * batch.entropy[i, t])
        if terms:
            per_sequence.append(torch.stack(terms))
    if loss.normalize == "token":
        return torch.cat(per_sequence).mean()
    if loss.normalize == "sequence":
        return torch.stack([terms.mean() for terms in per_sequence]).mean()
    return torch.stack([terms.sum() / batch.width for terms in per_sequence]).mean()
