"""SimPO, ORPO and KTO against TRL and their formulas, on rows as the engine packs."""

import math
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packed_rows import Row
from torch.nn.functional import logsigmoid

from hybridrl.algorithms.preference_losses import (
    KTOLoss,
    ORPOLoss,
    SimPOLoss,
    desirability,
    log_ratio,
    reference_point,
)
from hybridrl.config import ConfigError

LENGTHS = (3, 7, 1, 2, 12, 5, 2, 2)
CLOSE: dict[str, Any] = {"rtol": 2e-7, "atol": 1e-9}
"""Our weights are float32: relative 6e-8."""
PAIR_LOSSES = [
    SimPOLoss(),
    SimPOLoss(beta=10.0, gamma=0.0),
    SimPOLoss(beta=0.5, gamma=1.6),
    ORPOLoss(),
    ORPOLoss(odds_weight=2.0),
]


def pair_loss(loss: Any, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """The paper's, of the log-probabilities of two responses."""
    h = chosen.mean(), rejected.mean()
    if isinstance(loss, SimPOLoss):  # equation 6
        return -logsigmoid(loss.beta * h[0] - loss.beta * h[1] - loss.gamma)
    odds = [x.exp() / (1 - x.exp()) for x in h]  # equations 3, 4 and 7
    return -h[0] - loss.odds_weight * logsigmoid(torch.log(odds[0] / odds[1]))


@pytest.mark.parametrize("loss", PAIR_LOSSES, ids=str)
def test_losses_of_pairs_agree_with_the_formula(loss: Any) -> None:
    """Any cut into micro-batches between pairs gives the same."""
    row = Row(LENGTHS, seed=1)
    log_probs = -row.draw().abs()
    leaf = log_probs.clone().requires_grad_()
    responses = [leaf[i, :n] for i, n in enumerate(LENGTHS)]
    pairs = zip(responses[::2], responses[1::2], strict=True)
    expected = torch.stack([pair_loss(loss, *pair) for pair in pairs]).mean()
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = row.batch_loss(loss, log_probs)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    total, grad = row.in_micro_batches([2, 6], loss, log_probs)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    scale = loss.beta if isinstance(loss, SimPOLoss) else loss.odds_weight
    rewards = scale * torch.stack([x.detach().mean() for x in responses])
    chosen, rejected = rewards.view(-1, 2)[row.sequence // 2].unbind(1)
    torch.testing.assert_close(metrics["chosen_reward"], chosen)
    torch.testing.assert_close(metrics["reward_margin"], chosen - rejected)
    assert torch.equal(metrics["accuracy"] == 1, chosen > rejected)


@pytest.mark.parametrize("loss", [SimPOLoss(), ORPOLoss()], ids=str)
def test_a_pair_with_one_side_counts_as_a_whole(loss: Any) -> None:
    row = Row((4, 0, 0, 3), seed=2)
    log_probs = -row.draw().abs()
    total, grad, _ = row.batch_loss(loss, log_probs)
    h = log_probs[0].mean(), log_probs[3, :3].mean()
    expected = -h[0]  # fine-tuning alone; nothing of the other pair, whose chosen side is empty
    if isinstance(loss, SimPOLoss):
        terms = [-logsigmoid(2.0 * h[0] - 1), -logsigmoid(-2.0 * h[1] - 1)]
        expected = torch.stack(terms).sum()
    assert total.item() == pytest.approx(expected.item() / 2, rel=1e-6)
    assert torch.isfinite(grad).all()


def test_a_sure_response_has_finite_odds() -> None:
    row = Row((2, 2))
    log_probs = torch.tensor([[0.0, 0.0], [-300.0, -300.0]])
    total, grad, metrics = row.batch_loss(ORPOLoss(odds_weight=1.0), log_probs)
    assert total.item() == pytest.approx(0.0, abs=1e-6)
    assert torch.isfinite(grad).all()
    assert metrics["log_odds_ratio"][0].item() == pytest.approx(math.log(1e6) + 300, rel=1e-3)
    total, grad, _ = row.batch_loss(ORPOLoss(odds_weight=1.0), log_probs.flip(0))
    assert total.item() == pytest.approx(300 + 300 + math.log(1e6), rel=1e-3)
    assert torch.isfinite(grad).all()


def kto_fields(row: Row, kl: float = 0.4) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    log_probs = -row.draw().abs()
    fields = {
        "reference_log_probs": log_probs + row.draw(),
        "sign": row.draw(each=False).sign(),
        "kl": torch.full_like(log_probs, kl),
    }
    return log_probs, fields


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.6)])
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_kto_agrees_with_the_formula(weights: tuple[float, float], beta: float) -> None:
    """Equations 7 and 8: the loss is lambda less the value; any cut gives the same."""
    row = Row((3, 7, 1, 4, 12, 5, 2), seed=3)
    log_probs, fields = kto_fields(row)
    leaf = log_probs.clone().requires_grad_()
    terms = []
    for i, length in enumerate(row.lengths):
        r = (leaf - fields["reference_log_probs"])[i, :length].sum()
        if fields["sign"][i, 0] > 0:
            terms.append(weights[0] - weights[0] * torch.sigmoid(beta * (r - 0.4)))
        else:
            terms.append(weights[1] - weights[1] * torch.sigmoid(beta * (0.4 - r)))
    expected = torch.stack(terms).mean()
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    loss = KTOLoss(beta=beta, desirable_weight=weights[0], undesirable_weight=weights[1])
    total, grad, metrics = row.batch_loss(loss, log_probs, **fields)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    total, grad = row.in_micro_batches([1, 4], loss, log_probs, **fields)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    assert 0 < metrics["accuracy"].mean() < 1
    assert (metrics["kl"] == 0.4).all()


def test_the_reference_point_is_a_mean_that_is_not_below_0() -> None:
    assert reference_point([1.0, -0.25]) == [0.375, 0.375]
    assert reference_point([-1.0, 0.25]) == [0.0, 0.0]
    assert reference_point([]) == []
    log_probs = torch.tensor([-1.0, -2.0, -0.5])
    assert log_ratio(log_probs, torch.tensor([-1.5, -2.5, -1.0])) == 1.5
    assert (desirability("chosen"), desirability("rejected")) == (1.0, -1.0)


ACCELERATOR = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda x: x)


def trl_experimental(name: str) -> Any:
    """A module of TRL."""
    reason = "TRL, an oracle here, is in the extra `bench`"
    return pytest.importorskip(f"trl.experimental.{name}", reason=reason)


@pytest.mark.parametrize(("beta", "gamma"), [(2.0, 1.0), (0.5, 0.3)])
def test_simpo_agrees_with_trl(beta: float, gamma: float) -> None:
    """TRL takes the margin as gamma / beta within the brackets."""
    trainer = SimpleNamespace(
        alpha=0.0, beta=beta, simpo_gamma=gamma, label_smoothing=0.0, loss_type="simpo",
        accelerator=ACCELERATOR,
    )  # fmt: skip
    row = Row(LENGTHS, seed=4)
    log_probs = -row.draw().abs()
    leaf = log_probs.clone().requires_grad_()
    means = torch.where(row.mask, leaf, 0.0).sum(1) / row.mask.sum(1)
    trl = trl_experimental("cpo").CPOTrainer
    losses, chosen, rejected = trl.cpo_loss(trainer, means[::2], means[1::2])
    (expected_grad,) = torch.autograd.grad(losses.mean(), leaf)
    total, grad, metrics = row.batch_loss(SimPOLoss(beta=beta, gamma=gamma), log_probs)
    torch.testing.assert_close(total, losses.mean().detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)
    torch.testing.assert_close(metrics["chosen_reward"], chosen[row.sequence // 2])
    torch.testing.assert_close(metrics["rejected_reward"], rejected[row.sequence // 2])


def test_orpo_agrees_with_trl() -> None:
    """Its odds ratio; its fine-tuning term has the prompt, too, which ours has not.

    TRL's odds are float32.
    """
    trainer = SimpleNamespace(beta=0.3, accelerator=ACCELERATOR)
    row = Row(LENGTHS, seed=5)
    log_probs = -row.draw().abs()
    leaf = log_probs.clone().requires_grad_()
    means = torch.where(row.mask, leaf, 0.0).sum(1) / row.mask.sum(1)
    trl = trl_experimental("orpo").ORPOTrainer
    odds, chosen, rejected, _, _ = trl.odds_ratio_loss(trainer, means[::2], means[1::2])
    expected = -means[::2].mean() - odds.mean()
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    total, grad, metrics = row.batch_loss(ORPOLoss(odds_weight=0.3), log_probs)
    torch.testing.assert_close(total, expected.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(
        metrics["chosen_reward"].float(), chosen[row.sequence // 2], rtol=1e-6, atol=1e-7
    )
    assert rejected.shape == (4,)


def test_kto_agrees_with_trl() -> None:
    """The reference point, too, of responses to other prompts."""
    trl = pytest.importorskip("trl", reason="TRL, an oracle here, is in the extra `bench`")
    row = Row((3, 7, 1, 4, 12, 5, 2), seed=6)
    log_probs, fields = kto_fields(row)
    others, others_reference = row.draw()[:, 0] + 1.5, row.draw()[:, 0]
    z = reference_point((others - others_reference).tolist())[0]
    assert z > 0
    fields["kl"] = torch.full_like(log_probs, z)
    leaf = log_probs.clone().requires_grad_()
    in_mask = torch.where(row.mask, leaf, 0.0)
    mask = torch.nn.functional.pad(row.mask, (1, 0)).long()  # a prompt of one token
    own, other = torch.zeros_like(mask), torch.ones_like(mask)

    def model(input_ids: torch.Tensor, **_: Any) -> Any:
        """Log-probabilities of the batch's responses, or those of the other prompts'."""
        nothing = torch.zeros(row.mask.shape)
        of_others = torch.nn.functional.pad(others[:, None], (row.width - 1, 0))
        log_probs = in_mask if input_ids is own else of_others
        return SimpleNamespace(log_probs=log_probs, entropy=nothing, mean_logits=nothing)

    trainer = SimpleNamespace(
        accelerator=ACCELERATOR,
        model=SimpleNamespace(training=False),
        calculate_KL=True,
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=1.2,
        undesirable_weight=0.7,
        _metrics={"eval": defaultdict(list)},
        _total_train_tokens=0,
    )
    trainer._compute_kl_logps = partial(trl.KTOTrainer._compute_kl_logps, trainer)
    inputs = {
        "input_ids": own,
        "attention_mask": own,
        "completion_mask": mask,
        "KL_input_ids": other,
        "KL_attention_mask": other,
        "KL_completion_mask": mask,
        "label": fields["sign"][:, 0] > 0,
        "ref_logps": torch.where(row.mask, fields["reference_log_probs"], 0.0).sum(1),
        "ref_KL_logps": others_reference,
    }
    expected = trl.KTOTrainer._compute_loss(trainer, model, inputs, False)
    assert trainer._metrics["eval"]["kl"] == [pytest.approx(z)]
    (expected_grad,) = torch.autograd.grad(expected, leaf)
    loss = KTOLoss(beta=0.3, desirable_weight=1.2, undesirable_weight=0.7)
    total, grad, _ = row.batch_loss(loss, log_probs, **fields)
    torch.testing.assert_close(total, expected.detach(), **CLOSE)
    torch.testing.assert_close(grad, expected_grad, **CLOSE)


@pytest.mark.parametrize("loss", [SimPOLoss(), ORPOLoss(), KTOLoss()], ids=str)
def test_a_row_without_tokens_has_no_loss_but_a_graph(loss: Any) -> None:
    leaf = torch.zeros(0, requires_grad=True)
    fields = {name: torch.zeros(0) for name in loss.fields}
    values, metrics = loss(leaf, None, fields | {"sequence": torch.zeros(0, dtype=torch.int64)})
    assert values.shape == (0,)
    assert all(value.shape == (0,) for value in metrics.values())
    (grad,) = torch.autograd.grad(values.sum(), leaf)
    assert grad.shape == (0,)


@pytest.mark.parametrize(
    ("loss_class", "settings", "message"),
    [
        (SimPOLoss, {"beta": 0.0}, r"recipe\.beta=0.0: wanted above 0"),
        (SimPOLoss, {"gamma": -1.0}, r"recipe\.gamma=-1.0: wanted 0 or more"),
        (ORPOLoss, {"odds_weight": -0.1}, r"recipe\.odds_weight=-0.1: wanted 0 or more"),
        (KTOLoss, {"beta": -1.0}, r"recipe\.beta=-1.0: wanted above 0"),
        (KTOLoss, {"desirable_weight": -1.0}, r"recipe\.desirable_weight=-1.0: wanted 0 or more"),
    ],
)
def test_a_wrong_setting_is_named(loss_class: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        loss_class(**settings)
