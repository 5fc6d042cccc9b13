"""A vocabulary over real gloo processes against one process in float64."""

import pytest
import torch
import torch.distributed as dist

from hybridrl.kernels.linear_log_probs import VocabShard, linear_log_probs

TOKENS, WIDTH = 13, 8
# What the same inputs in the same dtype give in one process differs from float64 by as much.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}


def _inputs(vocab, dtype, tokens=TOKENS):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, WIDTH).to(dtype)
    weight = torch.randn(vocab, WIDTH).to(dtype)
    targets = torch.randint(vocab, (tokens,))
    targets[: min(2, tokens)] = torch.tensor([0, vocab - 1])[:tokens]
    return hidden, weight, targets, torch.randn(2, tokens, dtype=torch.float64)


def _reference(vocab, dtype, with_entropy, temperature):
    hidden, weight, targets, grads = _inputs(vocab, dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = torch.log_softmax(hidden @ weight.T / temperature, -1)
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = grads[0] @ log_probs + (grads[1] @ entropy if with_entropy else 0)
    return [log_probs, *([entropy] if with_entropy else []), *_grads(loss, hidden, weight)]


def _grads(loss, hidden, weight):
    return torch.autograd.grad(loss, (hidden, weight))


def _sharded(vocab, dtype, with_entropy, temperature, padded, tokens=TOKENS):
    """Values, the gradients of `hidden` and of this rank's part of the weight, with its padding."""
    hidden, weight, targets, grads = _inputs(vocab, dtype, tokens)
    rows = -(-vocab // dist.get_world_size())
    start = rows * dist.get_rank()
    mine = weight[start : start + rows]
    shard = VocabShard(dist.group.WORLD, min(start, vocab), len(mine))
    # Padding that would win every softmax, were it looked at.
    local = torch.cat([mine, torch.full((rows + padded - len(mine), WIDTH), 50.0).to(dtype)])
    hidden.requires_grad_()
    local.requires_grad_()
    log_probs, entropy = linear_log_probs(
        hidden, local, targets, temperature, with_entropy, 3 * TOKENS, shard
    )
    loss = grads[0].to(log_probs.dtype) @ log_probs
    if with_entropy:
        loss = loss + grads[1].to(entropy.dtype) @ entropy
    results = [log_probs, *([entropy] if with_entropy else []), *_grads(loss, hidden, local)]
    return [result.detach() for result in results], len(mine)


def _all_cases(cases):
    return [_sharded(*case) for case in cases]


@pytest.mark.parametrize("size", [2, 3])
def test_equals_one_process(ranks, size):
    """Uneven vocabularies, a rank with nothing (4 over 3), more padding than needed."""
    cases = [
        (vocab, dtype, with_entropy, temperature, padded)
        for dtype in TOLERANCE
        for with_entropy in (True, False)
        for vocab, temperature, padded in [(37, 1.0, 0), (37, 0.7, 3), (4, 1.3, 0), (36, 1.0, 0)]
    ]
    by_rank = ranks(size, _all_cases, cases)
    for case, results in zip(cases, zip(*by_rank, strict=True), strict=True):
        vocab, dtype, with_entropy, temperature, _ = case
        *values, grad_hidden, grad_weight = _reference(vocab, dtype, with_entropy, temperature)
        first = results[0][0]
        for (*replicated, local_grad), valid in results:
            assert local_grad.dtype == replicated[-1].dtype == dtype
            assert local_grad[valid:].eq(0).all(), case
            for mine, other in zip(replicated, first, strict=False):
                assert torch.equal(mine, other), f"ranks differ: {case}"
        gathered = torch.cat([result[-1][:valid] for result, valid in results])
        got = [*first[:-1], gathered]
        for result, want in zip(got, [*values, grad_hidden, grad_weight], strict=True):
            torch.testing.assert_close(
                result.double(),
                want.detach(),
                rtol=TOLERANCE[dtype],
                atol=TOLERANCE[dtype],
                msg=lambda text, case=case: f"{case}: {text}",
            )


def _no_tokens():
    hidden = torch.zeros(0, WIDTH, requires_grad=True)
    weight = torch.ones(5, WIDTH, requires_grad=True)
    shard = VocabShard(dist.group.WORLD, 5 * dist.get_rank(), 5)
    got, entropy = linear_log_probs(
        hidden, weight, torch.zeros(0, dtype=torch.long), 1.0, True, shard=shard
    )
    (got.sum() + entropy.sum()).backward()
    return got.shape, weight.grad.abs().max().item()


def test_no_tokens(ranks):
    assert ranks(2, _no_tokens) == [((0,), 0.0)] * 2


def _capped_and_biased(vocab):
    hidden, weight, targets, grads = _inputs(vocab, torch.float64)
    bias = torch.linspace(-1, 1, vocab, dtype=torch.float64)
    rows = -(-vocab // dist.get_world_size())
    start = rows * dist.get_rank()
    size = len(weight[start : start + rows])
    padding = rows + 2 - size
    local = torch.cat([weight[start : start + rows], torch.full((padding, WIDTH), 50.0).double()])
    local_bias = torch.cat([bias[start : start + rows], torch.full((padding,), 50.0).double()])
    inputs = [x.requires_grad_() for x in (hidden, local, local_bias)]
    shard = VocabShard(dist.group.WORLD, min(start, vocab), size)
    log_probs, entropy = linear_log_probs(
        hidden, local, targets, 0.7, True, 3 * TOKENS, shard, bias=local_bias, cap=2.0
    )
    loss = grads[0] @ log_probs + grads[1] @ entropy
    return [x.detach() for x in (log_probs, *torch.autograd.grad(loss, inputs))], size


def test_cap_and_bias_equal_one_process(ranks):
    vocab = 37
    hidden, weight, targets, grads = _inputs(vocab, torch.float64)
    bias = torch.linspace(-1, 1, vocab, dtype=torch.float64)
    inputs = [x.requires_grad_() for x in (hidden, weight, bias)]
    log_p = torch.log_softmax(2 * torch.tanh((hidden @ weight.T + bias) / 2) / 0.7, -1)
    log_probs = log_p.gather(-1, targets[:, None])[:, 0]
    loss = grads[0] @ log_probs - grads[1] @ (log_p.exp() * log_p).sum(-1)
    wanted = [log_probs, *torch.autograd.grad(loss, inputs)]
    results = ranks(2, _capped_and_biased, vocab)
    for index, want in enumerate(wanted):
        if index < 2:
            got = results[0][0][index]
        else:  # shards of the weight and of the bias; their padding has no gradient
            got = torch.cat([result[index][:size] for result, size in results])
            assert all(result[index][size:].eq(0).all() for result, size in results)
        torch.testing.assert_close(got, want.detach(), rtol=0, atol=1e-12)


def _exchanged():
    """Shapes of every all-reduce, forward and backward, with several chunks a rank."""
    tokens = 6
    hidden = torch.randn(tokens, WIDTH, requires_grad=True)
    weight = torch.randn(64, WIDTH, requires_grad=True)
    shard = VocabShard(dist.group.WORLD, 64 * dist.get_rank(), 64)
    targets = torch.arange(tokens)
    with torch.profiler.profile(record_shapes=True) as forward:
        log_probs, entropy = linear_log_probs(hidden, weight, targets, 1.0, True, 1, shard)
    with torch.profiler.profile(record_shapes=True) as backward:
        (log_probs + entropy).sum().backward()
    return [
        [event.input_shapes for event in profile.events() if event.name == "gloo:all_reduce"]
        for profile in (forward, backward)
    ]


def test_exchanges_little(ranks):
    """Two all-reduces of [2, tokens] forward and one of `hidden` backward, however many chunks."""
    for forward, backward in ranks(2, _exchanged):
        assert forward == [[[2, 6]], [[2, 6]]]
        assert backward == [[[6, WIDTH]]]


def test_a_shard_longer_than_the_weight_is_refused():
    shard = VocabShard(None, 0, 6)
    with pytest.raises(ValueError, match=r"shard.size=6: weight has 5 rows"):
        linear_log_probs(
            torch.zeros(2, 3), torch.zeros(5, 3), torch.zeros(2, dtype=torch.long), shard=shard
        )
