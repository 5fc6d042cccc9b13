"""Per-token estimators of KL(policy || reference) from tokens that the policy sampled.

J. Schulman, "Approximating KL divergence", 2020 (joschu.net/blog/kl-approx.html). All take the log
probabilities of the sampled tokens, any shape, and give the same shape.

Values and gradients are two matters. With tokens sampled from the policy itself, the expected
*value* of k1 and k3 is the KL. Differentiated as a loss, the expected *gradient* is
- k1: zero, the expectation of the score function; it does not pull towards the reference at all;
- k2: that of KL(policy || reference), although its value is biased;
- k3: that of KL(reference || policy), the other direction. GRPO's choice (arXiv 2402.03300, eq. 4).
To regularize by k1, subtract it from the reward instead.
"""

import torch

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this magnitude before `exp`, as in verl; past it, no gradient."""


def k1(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """log(p/q): unbiased, of either sign, high variance."""
    return log_probs - reference_log_probs


def k2(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """log(p/q)^2 / 2: never negative, biased, low variance while p and q are close."""
    return 0.5 * (log_probs - reference_log_probs).square()


def k3(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> torch.Tensor:
    """q/p - 1 - log(q/p): never negative, unbiased, low variance."""
    log_ratio = (reference_log_probs - log_probs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    # expm1 keeps the digits that exp(x) - 1 loses where p and q are close.
    return torch.expm1(log_ratio) - log_ratio
