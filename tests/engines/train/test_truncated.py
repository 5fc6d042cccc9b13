"""Training on truncated distributions: an enumerated oracle, and every layout against float64."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from surrogate_loss import Surrogate
from transformers import AutoModelForCausalLM

from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.config import ModelConfig, OptimConfig, TrainerConfig, TrainLayoutConfig
from hybridrl.engines.rollout.interface import SamplingParams
from hybridrl.engines.rollout.sampling import SamplingBatch, sample
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.engines.train.truncated import kept_rows, truncated
from hybridrl.kernels.linear_log_probs import linear_log_probs

VOCAB, TEMPERATURE = 41, 0.7
Ranks = Callable[..., list[Any]]


# One distribution of 12 tokens, whose outcomes are all enumerated in float64


def expected(
    logits: torch.Tensor, kept: torch.Tensor, advantages: torch.Tensor, replays: bool
) -> tuple[float, torch.Tensor]:
    """The mean ratio to the policy that sampled, and the expected gradient of the clipped loss.

    `kept` [k] are the ids of which a token is drawn, `advantages` [vocab] what each earns. The old
    log-probabilities are the trainer's.
    """
    sampled = logits[kept].log_softmax(0)
    weight = logits.clone()[:, None].requires_grad_()
    rows = kept.expand(len(kept), -1)
    hidden = torch.ones(len(kept), 1, dtype=torch.float64)
    log_probs, _ = linear_log_probs(hidden, weight, kept, candidates=rows if replays else None)
    if replays:
        log_probs, _ = truncated(log_probs, None, rows, kept)
    fields = {"old_log_probs": log_probs.detach(), "advantages": advantages[kept]}
    values, _ = ClippedLoss(clip_low=1.0, clip_high=10.0)(log_probs, None, fields)
    (sampled.exp() * values).sum().backward()
    ratio = (sampled.exp() * (log_probs.detach() - sampled).exp()).sum()
    assert weight.grad is not None
    return float(ratio), -weight.grad[:, 0]


@pytest.mark.parametrize(
    ("way", "ratio", "error"),
    [
        ({"top_p": 0.9}, 0.923, 0.17),
        ({"top_p": 0.7}, 0.746, 0.88),
        ({"top_k": 4}, 0.831, 0.62),
        ({"min_p": 0.1}, 0.893, 0.28),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_expected_advantage(
    way: dict[str, float], ratio: float, error: float
) -> None:
    """Over the kept ids; without them it is off by as much as the last numbers say."""
    torch.manual_seed(0)
    logits, advantages = (torch.randn(12, dtype=torch.float64) for _ in range(2))
    logits = 1.5 * logits
    params = SamplingParams(1, keeps_ids=True, **{"top_k": 12, **way})  # type: ignore[arg-type]
    batch = SamplingBatch.of([params], 12, torch.device("cpu"))
    *_, ids = sample(logits[None], torch.tensor([0.5], dtype=torch.float64), batch)
    assert ids is not None
    kept = ids[0][ids[0] >= 0].long()
    free = logits.clone().requires_grad_()
    (free[kept].softmax(0) * advantages[kept]).sum().backward()
    true = free.grad
    assert true is not None

    mean, gradient = expected(logits, kept, advantages, replays=True)
    assert mean == pytest.approx(1, abs=1e-12)
    torch.testing.assert_close(gradient, true, rtol=0, atol=1e-12)
    _, constant = expected(logits, kept, torch.ones(12, dtype=torch.float64), replays=True)
    assert constant.abs().max() < 1e-12

    mean, gradient = expected(logits, kept, advantages, replays=False)
    assert mean == pytest.approx(ratio, abs=5e-3)
    assert (gradient - true).norm() / true.norm() == pytest.approx(error, abs=2e-2)


# Whole engines


@pytest.fixture
def kept(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """The sequences with random kept ids, which have the token drawn; some tokens have none.

    The last sequence has no record, as the dataset's answers have none.
    """
    random = torch.Generator().manual_seed(5)
    for sequence in sequences[:-1]:
        counts, ids = [], []
        for token in sequence.ids[len(sequence.ids) - sequence.response_tokens :].tolist():
            number = int(torch.randint(0, 8, (), generator=random))
            others = torch.randperm(VOCAB, generator=random)[:number].tolist()
            own = sorted({token, *others}) if number else []
            counts.append(len(own))
            ids += own
        assert {min(counts), max(counts)} != {0}
        sequence.kept_ids = torch.tensor([*counts, *ids]).int()
    return sequences


def oracle(
    path: str, sequences: list[TrainSequence]
) -> tuple[float, dict[str, torch.Tensor], list[torch.Tensor]]:
    """Loss, gradients and log-probabilities in float64, each sequence alone."""
    model = AutoModelForCausalLM.from_pretrained(path).double()
    loss = Surrogate(entropy_bonus=0.3)
    total, tokens, scores = torch.zeros((), dtype=torch.float64), 0, []
    for s in sequences:
        num = s.response_tokens
        logits = model(s.ids[None]).logits[0, -num - 1 : -1] / TEMPERATURE
        if s.kept_ids is not None:
            counts, ids = s.kept_ids.long().tensor_split([num])
            for row, own in enumerate(ids.split(counts.tolist())):
                left_out = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, own, not len(own))
                if len(own):
                    logits = logits.index_put(
                        (torch.tensor(row), left_out), torch.tensor(-1e9, dtype=torch.float64)
                    )
        log_p = logits.log_softmax(-1)
        chosen = log_p.gather(-1, s.ids[-num:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        advantages = torch.tensor(s.fields["advantages"])
        fields = {"advantages": advantages, "old_log_probs": s.fields["old_log_probs"]}
        mask = torch.ones(num, dtype=torch.bool) if s.mask is None else s.mask
        total = total + loss(chosen, entropy, fields)[0][mask].sum()
        tokens += int(mask.sum())
        scores.append(chosen.detach())
    (total / tokens).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return total.item() / tokens, gradients, scores


def step(
    path: str, sequences: list[TrainSequence], layout: dict[str, int], settings: dict[str, Any]
) -> tuple[list[torch.Tensor], dict[str, float], dict[str, torch.Tensor]]:
    """Log-probabilities of this rank's sequences, metrics, and all ranks' gradients."""
    settings = {"max_tokens_per_micro_batch": 30, **settings}
    engine = TrainEngine(
        path,
        model=ModelConfig(),
        trainer=TrainerConfig(
            optim=OptimConfig(lr=1e-2, clip_grad_norm=0.0),
            layout=TrainLayoutConfig(**layout),
            **settings,
        ),
        device=torch.device("cpu"),
        temperature=TEMPERATURE,
    )
    mine = sequences[dist.get_rank() :: dist.get_world_size()]
    scores, local = engine.log_probs(mine), {}

    def before_step(*_: object) -> None:
        for chunk in engine.chunks:
            for name, p in chunk.named_parameters():
                local[name] = p.grad.full_tensor().clone()

    engine.optimizer.register_step_pre_hook(before_step)
    metrics = engine.update(mine, Surrogate(entropy_bonus=0.3))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    return scores, metrics, {name: g for of_rank in gathered for name, g in of_rank.items()}


CASES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "one rank": ({}, {}),
    "chunks": ({}, {"chunk_tokens": 4, "max_tokens_per_micro_batch": 4}),
    "tp": ({"tp": 2}, {}),
    "fsdp": ({"fsdp": 2}, {"max_tokens_per_micro_batch": 9}),
    "pp": ({"pp": 2}, {}),
    "cp": ({"cp": 2}, {"max_tokens_per_micro_batch": 8}),
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.layouts] * (x != "one rank")) for x in CASES]
)
def test_a_step_equals_float64(
    tiny: Callable[..., str], kept: list[TrainSequence], ranks: Ranks, case: str
) -> None:
    layout, settings = CASES[case]
    path = tiny("qwen3", num_hidden_layers=4)
    loss, wanted, of_tokens = oracle(path, kept)
    size = math.prod(layout.values())
    for rank, (scores, metrics, gradients) in enumerate(
        ranks(size, step, path, kept, layout, settings)
    ):
        for got, expected_scores in zip(scores, of_tokens[rank::size], strict=True):
            torch.testing.assert_close(got.double(), expected_scores, rtol=0, atol=2e-5)
        assert metrics["loss"] == pytest.approx(loss, abs=2e-6)
        for name, gradient in wanted.items():
            got = gradients[name][: len(gradient)].double()
            assert (got - gradient).abs().max() < 2e-5, name


def test_rows_of_whole_distributions_have_no_kept_ids(sequences: list[TrainSequence]) -> None:
    """A token that is not among its kept ids is impossible."""
    first = sequences[0]
    first.kept_ids = torch.zeros(first.response_tokens, dtype=torch.int32)
    places = [torch.arange(len(first.ids) - first.response_tokens, len(first.ids))]
    assert kept_rows([first], places) is None
    log_probs = torch.randn(2, 10).log_softmax(1)
    own, _ = truncated(
        log_probs[:, [1, 4, 5]], None, torch.tensor([[4, 5]] * 2), torch.tensor([1, 5])
    )
    assert own.isinf().tolist() == [True, False]
