"""Reverse KL over a whole vocabulary, and the estimates that a sampled token gives of it."""

import pytest
import torch
from torch.nn import functional

from hybridrl.algorithms.distill import DistillLoss
from hybridrl.config import ConfigError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def two(shape: tuple[int, ...] = (6, 11)) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a student, and a teacher's log-probabilities, [tokens, vocab], float64."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return student.requires_grad_(), teacher.log_softmax(-1)


def test_the_expected_gradient_of_the_sampled_token_is_that_of_the_kl() -> None:
    """Over every token that the student can sample, weighted by its probability."""
    logits, teacher = two((11,))
    student = logits.log_softmax(-1)
    p = student.detach().exp()
    kl = functional.kl_div(teacher, student, log_target=True, reduction="sum")
    (expected,) = torch.autograd.grad(kl, logits, retain_graph=True)
    values, metrics = DistillLoss()(student, None, {"teacher_log_probs": teacher})
    (ours,) = torch.autograd.grad((p * values).sum(), logits, retain_graph=True)
    torch.testing.assert_close(ours, expected, **EXACT)
    torch.testing.assert_close((p * metrics["reverse_kl"]).sum(), kl.detach(), **EXACT)


def test_settings() -> None:
    assert DistillLoss().fields == ("teacher_log_probs",)
    assert not DistillLoss().needs_entropy
    with pytest.raises(ConfigError, match=r"recipe\.normalize=mean: wanted one of token"):
        DistillLoss(normalize="mean")
