"""Balances sequences of which several have one prompt, computed once where they are together.

A group of G responses of R tokens to a prompt of P has P + G R tokens in one part, and P more in
each further part. So groups are cut into as many pieces as balance needs, and not more. The
invariants are those of `balance`. Pure and deterministic.

A response's attention has the keys of its prompt and its own. So many short responses of a long
prompt have far more keys than tokens, and a part is bounded by both.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from hybridrl.pipelines.balance import (
    BY_TOKENS,
    SequenceCost,
    balance,
    cut,
    equal_number,
    evened,
    micro_batches,
)

KEYS_PER_TOKEN = 2
"""A part has at most so many keys for each token that it may have."""
_Split = Callable[[Sequence[int], Sequence[int]], list[list[int]]]
"""Parts of units, from the sizes and the costs of each."""


@dataclass(frozen=True, slots=True)
class PromptGroups:
    """Sequences of `lengths` tokens, the first `prompt_tokens` of which are a prompt.

    Those with equal `prompts` share it; one with None shares nothing. `samples_per_row`
    consecutive sequences stay together.

    Example: prompts (0, 0, 1) of 4 tokens and lengths (6, 7, 9). All together have 6 + 3 + 9
    tokens.
    """

    lengths: Sequence[int]
    prompts: Sequence[Hashable]
    prompt_tokens: Sequence[int]
    cost: SequenceCost = BY_TOKENS
    samples_per_row: int = 1

    def tokens_of(self, indices: Sequence[int]) -> int:
        """The tokens of the sequences of a part, each prompt once."""
        return sum(self.lengths[i] for i in indices) - sum(self._repeated(indices))

    def size_of(self, indices: Sequence[int]) -> int:
        """What the bound of a part holds for: its tokens, or its keys over `KEYS_PER_TOKEN`."""
        repeated = {self.prompts[i]: self.prompt_tokens[i] for i in indices}
        repeated.pop(None, None)
        keys = sum(self.lengths[i] for i in indices) + sum(repeated.values())
        return max(self.tokens_of(indices), -(-keys // KEYS_PER_TOKEN))

    def cost_of(self, indices: Sequence[int]) -> int:
        """The cost of a part: a response attends to its prompt, whose own cost counts once."""
        whole = sum(self.cost.of_all([self.lengths[i] for i in indices]))
        return whole - sum(self.cost.of_all(self._repeated(indices)))

    def heaviest(self, parts: Sequence[Sequence[int]]) -> int:
        """The cost of the part that costs most."""
        return max([self.cost_of(indices) for indices in parts], default=0)

    def micro_batches(self, max_tokens: int) -> list[list[int]]:
        """As few parts as hold `max_tokens` each, with as little cost in all as that allows.

        A row longer than the bound is a part by itself. Raises as `balance.micro_batches`.
        """

        if not self._has_shared:
            return micro_batches(self.lengths, max_tokens, self.samples_per_row, self.cost)

        def order(parts: list[list[int]]) -> tuple[int, int, int]:
            costs = [self.cost_of(indices) for indices in parts]
            return len(parts), sum(costs), max(costs, default=0)

        return self._best(lambda lengths, costs: cut(lengths, costs, max_tokens), order, max_tokens)

    def equal_number(self, num_parts: int, max_tokens: int) -> list[list[int]]:
        """`num_parts` parts whose heaviest costs least, within `max_tokens` where they fit."""

        if not self._has_shared:
            row = self.samples_per_row
            return equal_number(self.lengths, num_parts, max_tokens, row, self.cost)

        def split(lengths: Sequence[int], costs: Sequence[int]) -> list[list[int]]:
            return evened(lengths, costs, balance(lengths, num_parts), max_tokens)

        def order(parts: list[list[int]]) -> tuple[bool, int]:
            fit = all(self.size_of(indices) <= max_tokens for indices in parts)
            return not fit, self.heaviest(parts)

        return self._best(split, order, max_tokens)

    def deal(self, num_parts: int) -> list[list[int]]:
        """`num_parts` parts whose heaviest costs least."""
        return self._best(lambda _, costs: balance(costs, num_parts), self.heaviest)

    def _best(
        self,
        split: _Split,
        order: Callable[[list[list[int]]], object],
        max_tokens: int | None = None,
    ) -> list[list[int]]:
        """The first in `order` of the parts that `split` makes of ever smaller pieces of groups."""
        candidates = []
        for units in self._cuts(max_tokens):
            sizes = [self.size_of(unit) for unit in units]
            parts = split(sizes, [self.cost_of(unit) for unit in units])
            candidates.append(
                [sorted(i for unit in indices for i in units[unit]) for indices in parts]
            )
        return min(candidates, key=order)  # type: ignore[arg-type]

    def _cuts(self, max_tokens: int | None) -> Iterator[list[list[int]]]:
        """Units that stay together: groups in one piece each, then in 2, 4, ... until each is one.

        A piece is within `max_tokens`, unless it is one row.
        """
        rows = [
            [*range(start, start + self.samples_per_row)]
            for start in range(0, len(self.lengths), self.samples_per_row)
        ]
        by_prompt: dict[Hashable, list[int]] = {}
        for number, row in enumerate(rows):
            prompts = {self.prompts[i] for i in row}
            shared = len(prompts) == 1 and None not in prompts
            by_prompt.setdefault((*prompts,) if shared else -number - 1, []).append(number)
        pieces = 1
        while True:
            cuts = [self._cut(rows, numbers, pieces, max_tokens) for numbers in by_prompt.values()]
            yield [unit for units in cuts for unit in units]
            if all(len(numbers) <= pieces for numbers in by_prompt.values()):
                return
            pieces *= 2

    def _cut(
        self, rows: list[list[int]], numbers: Sequence[int], pieces: int, max_tokens: int | None
    ) -> list[list[int]]:
        """The rows of a group as `pieces`, or more where they are too long."""
        pieces = min(pieces, len(numbers))
        more = [self.tokens_of(rows[n]) - self.prompt_tokens[rows[n][0]] for n in numbers]
        while True:
            cuts = balance(more, pieces)
            units = [[i for n in indices for i in rows[numbers[n]]] for indices in cuts]
            largest = max(self.size_of(unit) for unit in units)
            if max_tokens is None or largest <= max_tokens or pieces == len(numbers):
                return units
            pieces += 1

    @property
    def _has_shared(self) -> bool:
        known = [prompt for prompt in self.prompts if prompt is not None]
        return len({*known}) < len(known)

    def _repeated(self, indices: Sequence[int]) -> list[int]:
        """The prompt's tokens of each sequence of a part whose prompt is there already."""
        seen: set[Hashable] = set()
        repeated = []
        for index in indices:
            prompt = self.prompts[index]
            if prompt in seen:
                repeated.append(self.prompt_tokens[index])
            elif prompt is not None:
                seen.add(prompt)
        return repeated
