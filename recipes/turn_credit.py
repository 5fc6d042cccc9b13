"""The rewards of a conversation's turns, for recipes with rewards per token."""

from hybridrl.algorithms import critic
from hybridrl.flow import Stream


def add_turn_credit(samples: Stream, reward: str, by_turn: bool) -> tuple[Stream, str]:
    """The field that says what is earned: the scalar `reward`, or where its turns have earned it.

    `by_turn` needs the tensors of `ActorHandle.generate` with `turns`.
    """
    if not by_turn:
        return samples, reward
    inputs = (reward, "turn", "turn_rewards")
    return samples.map(critic.turn_credit, inputs, ("turn_credit",)), "turn_credit"
