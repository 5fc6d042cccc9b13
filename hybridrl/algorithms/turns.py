"""Credit of a conversation's turns: what followed each, compared with others from the same state.

GiGPO, group-in-group policy optimization (Feng et al., arXiv 2505.10978, section 4). Returns and
tokens are computed on the ranks (`Stream.map`); groups in the driver, on lists with a number for
each turn (`Stream.by_group`).
"""

import itertools
from collections import defaultdict
from collections.abc import Sequence

import torch

from hybridrl.algorithms.advantages import Values, group_relative


def turn_returns(
    reward: float, turn_rewards: torch.Tensor, turn_state: torch.Tensor, *, gamma: float
) -> tuple[list[int], list[float]]:
    """The states before the turns of a conversation, and the discounted rewards from each on.

    R_t = sum over k >= t of gamma^(k-t) r_k (section 4.3). `turn_rewards` [turns] are the r_k; what
    `reward` has beyond their sum is earned by the last turn. `turn_state` [turns], int64.
    """
    earned = turn_rewards.double().tolist()
    earned[-1] += reward - sum(earned)
    from_the_end = itertools.accumulate(reversed(earned), lambda after, r: r + gamma * after)
    return turn_state.tolist(), [*from_the_end][::-1]


def group_in_group(
    rewards: Values,
    states: Sequence[Sequence[int]],
    returns: Sequence[Sequence[float]],
    *,
    turn_weight: float = 1.0,
    std_normalize: bool = True,
) -> list[list[float]]:
    """Advantages of the turns of one prompt's samples, [samples][turns].

    A = A_E + `turn_weight` A_S (section 4.4). A_E compares the samples' `rewards` [samples]
    (`group_relative`). A_S compares the `returns` [samples][turns] of all turns that have the same
    of `states` [samples][turns], in whatever sample. A turn that is alone in its state has A_S 0.
    """
    of_samples = group_relative(rewards, std_normalize=std_normalize)
    alike: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for sample, of_turns in enumerate(states):
        for turn, state in enumerate(of_turns):
            alike[state].append((sample, turn))
    advantages = [[a] * len(row) for a, row in zip(of_samples, states, strict=True)]
    for places in alike.values():
        compared = group_relative([returns[i][t] for i, t in places], std_normalize=std_normalize)
        for (i, t), advantage in zip(places, compared, strict=True):
            advantages[i][t] += turn_weight * advantage
    return advantages


def of_tokens(values: Sequence[float], turn: torch.Tensor) -> torch.Tensor:
    """The number of its turn at each token: [turns] to [tokens], by `turn` [tokens]."""
    return torch.tensor(values, dtype=torch.float32)[turn.long()]
