"""GSPO against verl, DPO and Bradley-Terry against their formulas, on rows as the engine packs."""

import math
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packed_rows import Row

from hybridrl.algorithms.kl import k3
from hybridrl.algorithms.sequence_losses import (
    BradleyTerryLoss,
    DPOLoss,
    DPOVariant,
    GMPOLoss,
    GSPOLoss,
    per_pair,
    per_sequence,
)
from hybridrl.config import ConfigError

LENGTHS = (3, 7, 1, 0, 12, 5, 2, 2)
CLOSE: dict[str, Any] = {"rtol": 2e-7, "atol": 1e-9}
"""Our weights are float32: relative 6e-8."""
MODES = {
    "token": "token-mean",
    "sequence": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}


@pytest.mark.parametrize("normalize", sorted(MODES))
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize("per_token", [False, True])
def test_gspo_agrees_with_verl(
    core_algos: ModuleType, normalize: str, spread: float, per_token: bool
) -> None:
    from verl.workers.config import ActorConfig

    row = Row((3, 7, 1, 12, 5, 2, 2))
    log_probs = -row.draw().abs()
    old = log_probs + spread * row.draw()
    advantages = row.draw(each=per_token)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.1,
        clip_ratio_high=0.2,
    )
    leaf = log_probs.clone().requires_grad_()
    expected, theirs = core_algos.compute_policy_loss_gspo(
        old, leaf, advantages, row.mask.double(), MODES[normalize], config
    )
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = row.batch_loss(
        GSPOLoss(clip_low=0.1, clip_high=0.2, normalize=normalize),
        log_probs,
        advantages=advantages,
        old_log_probs=old,
    )
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    clipped = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    assert clipped.mean().item() == pytest.approx(theirs["actor/pg_clipfrac"], abs=1e-6)
    assert (clipped.mean() > 0) == (spread > 0)
    torch.testing.assert_close(metrics["approx_kl"], k3(row.pack(old), row.pack(log_probs)))


def test_gspo_is_the_gradient_of_its_ratio() -> None:
    """Equation 5 written out, s differentiated whole; a sequence without tokens changes nothing."""
    row = Row(LENGTHS, seed=1)
    log_probs, advantages = -row.draw().abs(), row.draw(each=False)
    old = log_probs + 0.3 * row.draw()
    leaf = log_probs.clone().requires_grad_()
    terms = []
    for i, length in enumerate(LENGTHS):
        if length:
            s = (leaf[i, :length] - old[i, :length]).mean().exp()
            a = advantages[i, 0]
            terms.append(-torch.minimum(s * a, s.clamp(1 - 0.05, 1 + 0.1) * a))
    expected = torch.stack(terms).sum() / len(LENGTHS)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = row.batch_loss(
        GSPOLoss(clip_low=0.05, clip_high=0.1), log_probs, advantages=advantages, old_log_probs=old
    )
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    ratios = per_sequence(metrics["ratio"], row.sequence) / torch.tensor(LENGTHS).clamp(min=1)
    assert ratios[3] == 0
    assert ratios[2].item() == pytest.approx((log_probs - old)[2, 0].exp().item())


def test_gspo_stays_finite_at_extreme_ratios() -> None:
    row = Row((2, 2))
    log_probs = torch.tensor([[-300.0, -300.0], [0.0, 0.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
    total, grad, metrics = row.batch_loss(
        GSPOLoss(dual_clip=3.0),
        log_probs,
        advantages=advantages,
        old_log_probs=log_probs.flip(0).contiguous(),
    )
    assert total.item() == pytest.approx(1.5, abs=1e-6)
    assert torch.equal(grad, torch.zeros_like(grad))
    assert all(torch.isfinite(value).all() for value in metrics.values())


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.6)])
def test_gmpo_agrees_with_verl(
    core_algos: ModuleType, spread: float, low: float, high: float
) -> None:
    from verl.workers.config import ActorConfig

    row = Row((3, 7, 1, 12, 5, 2, 2))
    log_probs = -row.draw().abs()
    old = log_probs + spread * row.draw()
    advantages = row.draw(each=False)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=low,
        clip_ratio_high=high,
    )
    leaf = log_probs.clone().requires_grad_()
    expected, theirs = core_algos.compute_policy_loss_geo_mean(
        old, leaf, advantages, row.mask.double(), config=config
    )
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    loss, fields = GMPOLoss(clip_low=low, clip_high=high), {"old_log_probs": old}
    total, grad, metrics = row.batch_loss(loss, log_probs, advantages=advantages, **fields)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    # verl counts tokens beyond either bound, whether the clip binds or not.
    assert metrics["clip_fraction_high"].mean() <= theirs["actor/pg_clipfrac"] + 1e-6
    assert metrics["clip_fraction_low"].mean() <= theirs["actor/pg_clipfrac_lower"] + 1e-6
    clipped = metrics["clip_fraction_low"] + metrics["clip_fraction_high"]
    assert (clipped.mean() > 0) == (spread > 0)


def test_gmpo_is_the_geometric_mean_of_its_ratios() -> None:
    """Written out; a response without tokens changes nothing, nor any cut into micro-batches."""
    row = Row(LENGTHS, seed=1)
    log_probs, advantages = -row.draw().abs(), row.draw(each=False)
    old = log_probs + 0.5 * row.draw()
    leaf = log_probs.clone().requires_grad_()
    terms = []
    for i, length in enumerate(LENGTHS):
        if length:
            x, a = (leaf - old)[i, :length], advantages[i, 0]
            clipped = x.clamp(max=0.3) if a > 0 else x.clamp(min=-0.2)
            terms.append(-(clipped.exp().prod() ** (1 / length)) * a)
    expected = torch.stack(terms).sum() / len(LENGTHS)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    loss = GMPOLoss(clip_low=0.2, clip_high=0.3)
    fields = {"advantages": advantages, "old_log_probs": old}
    for total, grad in (
        row.batch_loss(loss, log_probs, **fields)[:2],
        row.in_micro_batches([3, 4], loss, log_probs, **fields),
    ):
        torch.testing.assert_close(total, expected.detach(), **CLOSE)
        torch.testing.assert_close(grad, expected_grad, **CLOSE)


def dpo_pair(loss: DPOLoss, chosen: list[Any], rejected: list[Any]) -> torch.Tensor:
    """Equation 7 of DPO, or 17 of IPO, of lists of the tokens' log-ratios."""
    zero = torch.zeros((), dtype=torch.float64)
    h = [sum(side, zero) for side in (chosen, rejected)]
    if loss.variant is DPOVariant.ipo:
        h = [a / max(len(side), 1) for a, side in zip(h, (chosen, rejected), strict=True)]
        return (h[0] - h[1] - 1 / (2 * loss.beta)) ** 2
    m = loss.beta * (h[0] - h[1])
    e = loss.label_smoothing
    return (1 - e) * torch.log(1 + torch.exp(-m)) + e * torch.log(1 + torch.exp(m))


@pytest.mark.parametrize(
    "loss",
    [
        DPOLoss(),
        DPOLoss(beta=0.5, label_smoothing=0.1),
        DPOLoss(beta=2.0, label_smoothing=0.5),
        DPOLoss(variant=DPOVariant.ipo),
        DPOLoss(variant=DPOVariant.ipo, beta=1.5),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [LENGTHS, (4, 4), (5, 0), (0, 2, 0, 0, 3, 1)])
def test_dpo_agrees_with_the_formula(loss: DPOLoss, lengths: tuple[int, ...]) -> None:
    row = Row(lengths, seed=2)
    log_probs = -row.draw().abs()
    reference = log_probs + row.draw()
    leaf = log_probs.clone().requires_grad_()
    ratios = [list((leaf - reference)[i, :n]) for i, n in enumerate(lengths)]
    pairs = list(zip(ratios[::2], ratios[1::2], strict=True))
    terms = [dpo_pair(loss, *pair) for pair in pairs if any(pair)]
    expected = torch.stack(terms).sum() / len(pairs)
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = row.batch_loss(loss, log_probs, reference_log_probs=reference)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    rewards = loss.beta * torch.stack([sum(x, torch.zeros(())) for x in ratios]).detach()
    chosen, rejected = rewards.view(-1, 2)[row.sequence // 2].unbind(1)
    torch.testing.assert_close(metrics["chosen_reward"], chosen.double(), check_dtype=False)
    torch.testing.assert_close(metrics["reward_margin"], chosen - rejected, check_dtype=False)
    assert torch.equal(metrics["accuracy"] == 1, chosen > rejected)


def test_dpo_begins_at_log_2_and_stays_finite() -> None:
    row = Row((3, 2))
    log_probs = -row.draw().abs()
    total, grad, _ = row.batch_loss(DPOLoss(), log_probs, reference_log_probs=log_probs)
    assert total.item() == pytest.approx(math.log(2))
    # d/dh of -log sigmoid(beta h) at 0 is -beta / 2.
    expected = torch.where(row.mask, torch.tensor([[-0.05], [0.05]]), 0.0).double()
    torch.testing.assert_close(grad, expected, rtol=1e-6, atol=1e-9)
    far = torch.where(torch.tensor([[True], [False]]), -1e5, 0.0).double().expand(-1, 3)
    total, grad, _ = row.batch_loss(DPOLoss(), far.contiguous(), reference_log_probs=-far)
    assert total.item() == pytest.approx(0.1 * 6e5, rel=1e-6)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("center", [0.0, 0.01])
@pytest.mark.parametrize("signed", [False, True])
def test_bradley_terry_agrees_with_the_formula(center: float, signed: bool) -> None:
    loss = BradleyTerryLoss(center=center, signed=signed)
    assert loss.fields == ("sign",) * signed
    row = Row((1,) * 8, seed=3)
    rewards = 2 * row.draw()
    signs = row.draw().sign()
    leaf = rewards.clone().requires_grad_()
    terms = []
    for i in range(0, 8, 2):
        chosen, rejected = leaf[i, 0], leaf[i + 1, 0]
        difference = chosen - rejected
        term = torch.log(1 + torch.exp(-difference)) + center * (chosen + rejected) ** 2
        for side in (i, i + 1) if signed else ():
            term = term + torch.log(1 + torch.exp(-signs[side, 0] * leaf[side, 0]))
        terms.append(term)
    expected = torch.stack(terms).mean()
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = row.batch_loss(loss, rewards, sign=signs)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    if signed:
        assert metrics["sign_accuracy"].mean() == (signs * rewards > 0).double().mean()
    assert metrics["accuracy"].mean() == (rewards[::2] > rewards[1::2]).double().mean()
    difference = (rewards[::2, 0] - rewards[1::2, 0]).repeat_interleave(2)
    torch.testing.assert_close(metrics["reward_margin"], difference)


class Trainer(SimpleNamespace):
    """What the losses of TRL's trainers read of their trainer, on one process."""

    def __init__(self, **settings: Any) -> None:
        accelerator = SimpleNamespace(
            device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
        )
        super().__init__(
            accelerator=accelerator,
            model=SimpleNamespace(training=False),
            _metrics={"eval": defaultdict(list)},
            _total_train_tokens=0,
            **settings,
        )


def in_halves(x: torch.Tensor) -> torch.Tensor:
    """The chosen sequences, then the rejected ones, as TRL has them."""
    return torch.cat([x[::2], x[1::2]])


@pytest.mark.parametrize(
    "loss", [DPOLoss(beta=0.3), DPOLoss(variant=DPOVariant.ipo, beta=0.3)], ids=str
)
def test_dpo_agrees_with_trl(loss: DPOLoss) -> None:
    trl = pytest.importorskip("trl", reason="TRL, an oracle here, is in the extra `bench`")
    row = Row((3, 7, 1, 4, 12, 5, 2, 2), seed=4)
    log_probs = torch.where(row.mask, -row.draw().abs(), 0.0)
    reference = torch.where(row.mask, log_probs + row.draw(), 0.0)
    leaf = log_probs.clone().requires_grad_()
    mask = torch.nn.functional.pad(in_halves(row.mask), (1, 0)).long()  # a prompt of one token
    nothing = torch.zeros(mask.shape)
    outputs = SimpleNamespace(
        log_probs=in_halves(leaf), entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
    )
    trainer = Trainer(
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss.variant.value],
        loss_weights=[1.0],
        use_weighting=False,
        beta=loss.beta,
    )
    chosen, rejected = in_halves(reference.sum(1)).chunk(2)
    expected = trl.DPOTrainer._compute_loss(
        trainer,
        lambda **_: outputs,
        {
            "input_ids": torch.zeros_like(mask),
            "completion_mask": mask,
            "ref_chosen_logps": chosen,
            "ref_rejected_logps": rejected,
        },
        False,
    )
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = row.batch_loss(loss, log_probs, reference_log_probs=reference)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, torch.where(row.mask, expected_grad, 0.0), **CLOSE)
    # Once for each of a row's pairs, as TRL means them.
    first = [row.sequence.tolist().index(i) for i in range(0, 8, 2)]
    for ours, theirs in {
        "accuracy": "accuracies",
        "reward_margin": "margins",
        "chosen_reward": "chosen",
        "rejected_reward": "rejected",
    }.items():
        (wanted,) = trainer._metrics["eval"][f"rewards/{theirs}"]
        assert metrics[ours][first].mean().item() == pytest.approx(wanted)


@pytest.mark.parametrize("center", [0.0, 0.01])
def test_bradley_terry_agrees_with_trl(center: float) -> None:
    trl = pytest.importorskip("trl", reason="TRL, an oracle here, is in the extra `bench`")
    row = Row((1,) * 8, seed=5)
    rewards = 2 * row.draw()
    leaf = rewards.clone().requires_grad_()
    outputs = SimpleNamespace(logits=in_halves(leaf))
    trainer = Trainer(args=SimpleNamespace(center_rewards_coefficient=center))
    expected = trl.RewardTrainer.compute_loss(trainer, lambda **_: outputs, {})
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    loss = BradleyTerryLoss(center=center)
    total, grad, metrics = row.batch_loss(loss, rewards)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    assert metrics["accuracy"].mean().item() == pytest.approx(
        trainer._metrics["eval"]["accuracy"][0]
    )


@pytest.mark.parametrize(
    "loss", [GSPOLoss(), GMPOLoss(), DPOLoss(), BradleyTerryLoss(signed=True)], ids=str
)
def test_a_row_without_tokens_has_no_loss_but_a_graph(loss: Any) -> None:
    leaf = torch.zeros(0, requires_grad=True)
    fields = {name: torch.zeros(0) for name in loss.fields}
    values, metrics = loss(leaf, None, fields | {"sequence": torch.zeros(0, dtype=torch.int64)})
    assert values.shape == (0,)
    assert all(value.shape == (0,) for value in metrics.values())
    (grad,) = torch.autograd.grad(values.sum(), leaf)
    assert grad.shape == (0,)


def test_sums_go_by_the_sequences_number() -> None:
    sequence = torch.tensor([4, 0, 0, 2, 2, 2])
    x = torch.arange(6.0)
    assert per_sequence(x, sequence).tolist() == [3, 0, 12, 0, 0]
    assert per_pair(x, sequence).tolist() == [[3, 0], [12, 0], [0, 0]]


@pytest.mark.parametrize(
    ("loss_class", "settings", "message"),
    [
        (DPOLoss, {"beta": 0.0}, r"recipe\.beta=0.0: wanted above 0"),
        (DPOLoss, {"label_smoothing": 0.6}, r"recipe\.label_smoothing=0.6: wanted 0 to 0.5"),
        (
            DPOLoss,
            {"variant": DPOVariant.ipo, "label_smoothing": 0.1},
            "0: it is for variant=sigmoid",
        ),
        (BradleyTerryLoss, {"center": -1.0}, r"recipe\.center=-1.0: wanted 0 or more"),
        (GMPOLoss, {"clip_low": -0.1}, r"recipe\.clip_low=-0.1: wanted 0 or more"),
        (GSPOLoss, {"clip_low": 2.0}, r"recipe\.clip_low=2.0: wanted 0 to 1"),
    ],
)
def test_a_wrong_setting_is_named(loss_class: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_class(**settings)
