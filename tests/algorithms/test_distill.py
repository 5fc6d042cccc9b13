"""Reverse KL over a whole vocabulary, and the estimates that a sampled token gives of it."""

import pytest
import torch
from torch.nn import functional

from hybridrl.algorithms.distill import DistillLoss, Divergence, TopKDistillLoss, with_rest
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


def top_of(log_probs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    top = log_probs.topk(k)
    return top.indices, top.values


@pytest.mark.parametrize("kind", Divergence)
def test_the_whole_vocabulary_makes_it_exact(kind: Divergence) -> None:
    """Value and gradient are torch's, of all tokens; the rest has nothing."""
    logits, teacher = two()
    student = logits.log_softmax(-1)

    def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)

    mean = ((student.exp() + teacher.exp()) / 2).log()
    wanted = {
        Divergence.forward_kl: lambda: kl(teacher, student),
        Divergence.reverse_kl: lambda: kl(student, teacher),
        Divergence.jsd: lambda: (kl(student, mean) + kl(teacher, mean)) / 2,
    }[kind]()
    ids, values = top_of(teacher, 11)
    loss = TopKDistillLoss(top_k=11, divergence=kind)
    fields = {"teacher_top_log_probs": values, "candidate_log_probs": student.gather(1, ids)}
    got, metrics = loss(student[:, 0], None, fields)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(metrics["teacher_mass"], torch.ones(6).double())
    (expected,) = torch.autograd.grad(wanted.sum(), logits, retain_graph=True)
    (ours,) = torch.autograd.grad(got.sum(), logits, retain_graph=True)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=2e-5)  # LEAST_REST


def test_the_forward_kl_is_verls_and_the_rest() -> None:
    """verl's `forward_kl_topk` sums over the top k alone, which may be below 0."""
    logits, teacher = two()
    student = logits.log_softmax(-1)
    ids, values = top_of(teacher, 3)
    here = student.gather(1, ids)
    verls = (values.exp() * (values - here)).sum(-1)  # verl.trainer.distillation.fsdp.losses
    rest_q, rest_p = 1 - values.exp().sum(-1), 1 - here.exp().sum(-1)
    loss = TopKDistillLoss(top_k=3, divergence=Divergence.forward_kl)
    fields = {"teacher_top_log_probs": values, "candidate_log_probs": here}
    got, metrics = loss(student[:, 0], None, fields)
    torch.testing.assert_close(got, verls + rest_q * (rest_q / rest_p).log(), **EXACT)
    torch.testing.assert_close(metrics["student_mass"], (1 - rest_p).detach(), **EXACT)


@pytest.mark.parametrize("kind", Divergence)
@pytest.mark.parametrize("k", [1, 3, 11])
def test_it_is_a_divergence(kind: Divergence, k: int) -> None:
    """Never below 0; 0 for the same distribution, without a gradient; finite where all is sure."""
    logits, teacher = two((200, 11))
    student = logits.log_softmax(-1)
    loss = TopKDistillLoss(top_k=k, divergence=kind)

    def of(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        ids, values = top_of(teacher, k)
        fields = {"teacher_top_log_probs": values, "candidate_log_probs": student.gather(1, ids)}
        return loss(student[:, 0], None, fields)[0]

    assert (of(student, teacher) > 0).all()
    same = of(student, student.detach())
    assert same.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(same.sum(), logits, retain_graph=True)
    assert gradient.abs().max() < 1e-12
    sure = (50 * logits.float()).log_softmax(-1)
    sums = of(sure, sure.flip(-1).detach()) + of(sure, sure.detach())
    (gradient,) = torch.autograd.grad(sums.sum(), logits)
    assert sums.isfinite().all()
    assert gradient.isfinite().all()


def test_a_row_without_tokens() -> None:
    loss = TopKDistillLoss(top_k=4)
    nothing = torch.zeros(0, requires_grad=True)
    fields = {"teacher_top_log_probs": torch.zeros(0), "candidate_log_probs": torch.zeros(0, 4)}
    assert loss(nothing, None, fields)[0].shape == (0,)
    assert with_rest(torch.zeros(0, 4)).shape == (0, 5)
