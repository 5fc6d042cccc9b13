"""Losses on packed ragged tensors against verl's padded ones and the formula in float64."""

import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.algorithms.losses import ClippedLoss, CrossEntropyLoss
from hybridrl.algorithms.normalise import token_weights
from hybridrl.config import ConfigError

LENGTHS = (3, 7, 1, 0, 12, 5)
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

    def ours(self, loss: Any) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Batch loss, its gradient [sequences, width], metrics averaged over the tokens."""
        leaf = self.log_probs.clone().requires_grad_()
        fields = {
            "advantages": self.advantages[self.mask],
            "old_log_probs": self.old[self.mask],
            "reference_log_probs": self.reference[self.mask],
        }
        values, metrics = loss(
            leaf[self.mask], self.entropy[self.mask], {name: fields[name] for name in loss.fields}
        )
        used = [n for n in self.lengths if n]
        weights = token_weights(self.lengths, loss.normalise, sum(used), len(used), self.width)
        total = (weights.double() * values).sum()
        (grad,) = torch.autograd.grad(total, leaf)
        return total.detach(), grad, {name: value.mean() for name, value in metrics.items()}


@pytest.mark.parametrize("normalise", sorted(VERL_MODES))
@pytest.mark.parametrize(("clip_high", "dual_clip"), [(0.2, 3.0), (0.28, 1.5)])
@pytest.mark.parametrize("spread", [0.0, 0.5, 15.0])
def test_clipped_loss_agrees_with_verl(
    core_algos: ModuleType, normalise: str, clip_high: float, dual_clip: float, spread: float
) -> None:
    batch = Batch(LENGTHS, spread)
    leaf = batch.log_probs.clone().requires_grad_()
    config = _VerlConfig(clip_high, dual_clip)
    expected, theirs = core_algos.compute_policy_loss_vanilla(
        old_log_prob=batch.old,
        log_prob=leaf,
        advantages=batch.advantages,
        response_mask=batch.mask.double(),
        loss_agg_mode=VERL_MODES[normalise],
        config=config,
    )
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = batch.ours(
        ClippedLoss(clip_high=clip_high, dual_clip=dual_clip, normalise=normalise)
    )
    # Our weights are float32: relative 6e-8.
    torch.testing.assert_close(total, expected.detach(), rtol=2e-7, atol=1e-9)
    torch.testing.assert_close(grad, expected_grad, rtol=2e-7, atol=1e-9)
    clipped = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    assert clipped.item() == pytest.approx(theirs["actor/pg_clipfrac"], abs=1e-6)
    dual = metrics["clip_fraction_dual"].item()
    assert dual == pytest.approx(theirs["actor/pg_clipfrac_lower"], abs=1e-6)
    if spread:
        assert clipped > 0


@pytest.mark.parametrize("dual_clip", [None, 2.0])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
@pytest.mark.parametrize("normalise", sorted(VERL_MODES))
def test_clipped_loss_agrees_with_the_formula(
    dual_clip: float | None, kl: str, normalise: str
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
        normalise=normalise,
    )
    assert loss.fields == ("advantages", "old_log_probs", "reference_log_probs")
    assert loss.needs_entropy
    total, grad, _ = batch.ours(loss)
    leaf = batch.log_probs.clone().requires_grad_()
    expected = _formula(leaf, batch, loss)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    torch.testing.assert_close(total, expected.detach(), rtol=2e-7, atol=1e-9)
    torch.testing.assert_close(grad, expected_grad, rtol=2e-7, atol=1e-9)


def test_sequence_normalisation_without_clipping_is_the_group_mean_of_trl() -> None:
    """On the first update (old = new) GRPO's loss is minus the mean advantage, its gradient
    minus advantage over length: what TRL computes for loss_type="grpo" (arXiv 2402.03300, eq. 3).
    """
    batch = Batch((4, 2, 9), spread=0.0)
    total, grad, metrics = batch.ours(ClippedLoss(normalise="sequence"))
    torch.testing.assert_close(total, -batch.advantages[:, 0].mean(), rtol=1e-6, atol=0.0)
    lengths = torch.tensor(batch.lengths)[:, None]
    expected = torch.where(batch.mask, -batch.advantages / lengths / 3, 0.0)
    torch.testing.assert_close(grad, expected, rtol=2e-7, atol=0.0)
    assert metrics["ratio"] == 1
    assert metrics["approx_kl"] == 0


def test_all_masked_is_zero_with_zero_gradient() -> None:
    batch = Batch((0, 0))
    for normalise in VERL_MODES:
        total, grad, _ = batch.ours(ClippedLoss(normalise=normalise, kl_coef=0.1))
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
    for loss in (ClippedLoss(dual_clip=3.0, kl_coef=0.1, kl="k2"), CrossEntropyLoss()):
        assert pickle.loads(pickle.dumps(loss)) == loss


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": "k4"}, r"recipe\.kl=k4: wanted one of k1, k2, k3"),
        ({"normalise": "mean"}, r"recipe\.normalise=mean: wanted one of token, sequence, constant"),
        ({"dual_clip": 0.9}, r"recipe\.dual_clip=0.9: wanted above 1"),
        ({"clip_low": 1.5}, r"recipe\.clip_low=1.5: wanted 0 to 1"),
        ({"clip_high": -0.1}, r"recipe\.clip_high=-0.1: wanted 0 or above"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ClippedLoss(**settings)


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
    if loss.normalise == "token":
        return torch.cat(per_sequence).mean()
    if loss.normalise == "sequence":
        return torch.stack([terms.mean() for terms in per_sequence]).mean()
    return torch.stack([terms.sum() / batch.width for terms in per_sequence]).mean()
