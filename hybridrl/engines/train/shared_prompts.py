"""Rows that hold a prompt once for all its responses.

The responses of a group have one prompt, and a causal model's states of it do not depend on them.
So a row has the prompt once, and responses attend to its keys and values (`SharedPrompts` of
`models.packed_attention`). With P tokens of the prompt and G responses of R tokens the row has
P + G R tokens in place of G (P + R) (Periodic Asynchrony, arXiv 2511.18871).

Sequences share a prompt if its ids and images are equal, and the experts that are replayed for it.
A response of many more tokens than its prompt is computed with it: there is little to save, and
torch's attention with a mask takes up to twice the time of a causal one.
"""

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.distributed import ProcessGroup

from hybridrl.config import Attention
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.image_files import digest_of
from hybridrl.models.packed_attention import (
    Packing,
    make_packing,
    make_shared_packing,
    seen_tokens,
)
from hybridrl.pipelines.balance import BY_TOKENS, SequenceCost
from hybridrl.pipelines.prompt_groups import PromptGroups

LONGEST_RESPONSE = 4
"""A response that shares its prompt has at most so many tokens for each of the prompt."""


def prompt_of(sequence: TrainSequence) -> Hashable:
    """What sequences that share a prompt have in common; None for one that shares none."""
    prompt = sequence.ids.shape[0] - sequence.response_tokens
    if not 0 < sequence.response_tokens <= LONGEST_RESPONSE * prompt:
        return None
    digest = hashlib.blake2b(sequence.ids[:prompt].numpy().tobytes(), digest_size=16)
    if sequence.routed_experts is not None:
        digest.update(sequence.routed_experts[:prompt].numpy().tobytes())
    for image in sequence.images:  # pads are alike, whatever they stand for
        digest.update(digest_of(image))
    return digest.digest()


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The pieces of a row, by ascending length: whole sequences, prompts, and responses.

    `order` are the sequences, in the order of the pieces with their ends. A piece has `lengths`
    tokens. A response's come after `before` others, which begin at the position `starts` of the
    row. `prompts` and `ends` have the pieces of each sequence in `order`: that with its end, and
    that with its prompt, which may be the same.
    """

    order: list[int]
    lengths: list[int]
    before: list[int]
    starts: list[int]
    prompts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence], shares_prompts: bool) -> "Arrangement":
        """Arrange `sequences`; a prompt is shared where several of them have it."""
        sizes = [sequence.ids.shape[0] for sequence in sequences]
        before, groups = [0] * len(sizes), _groups(sequences) if shares_prompts else []
        for indices in groups:
            for index in indices:
                before[index] = sizes[index] - sequences[index].response_tokens
        # Each with its tokens, those before it, and the sequence that it ends or the group.
        pieces = [(sizes[i] - before[i], before[i], i, True) for i in range(len(sizes))]
        pieces += [(before[own[0]], 0, number, False) for number, own in enumerate(groups)]
        pieces.sort(key=lambda piece: piece[:2])

        lengths = [piece[0] for piece in pieces]
        prompts: dict[int, tuple[int, int]] = {}  # of each sequence the piece, where it begins
        position = 0
        for place, (length, _, number, is_end) in enumerate(pieces):
            if not is_end:
                prompts |= dict.fromkeys(groups[number], (place, position))
            position += length
        ends = [place for place, piece in enumerate(pieces) if piece[3]]
        order = [pieces[place][2] for place in ends]
        return cls(
            order=order,
            lengths=lengths,
            before=[piece[1] for piece in pieces],
            starts=[prompts[i][1] if more else 0 for _, more, i, _ in pieces],
            prompts=[
                prompts[i][0] if i in prompts else place
                for i, place in zip(order, ends, strict=True)
            ],
            ends=ends,
        )

    @property
    def shares(self) -> bool:
        """Whether a prompt is shared."""
        return any(self.before)

    def places(self) -> torch.Tensor:
        """Where the tokens of each sequence in `order` are in the row, [tokens of them all]."""
        begins = [*accumulate(self.lengths, initial=0)]
        return seen_tokens(
            [begins[place] for place in self.ends],
            [self.lengths[place] for place in self.ends],
            [self.before[place] for place in self.ends],
            [self.starts[place] for place in self.ends],
        )

    def packing(
        self, attention: Attention, device: torch.device, group: ProcessGroup | None
    ) -> Packing:
        """How the row is attended; the ranks of `group` share it."""
        lengths = self.lengths or [1]  # a row without sequences has a token
        if not self.shares:
            return make_packing(lengths, attention, device, group)
        return make_shared_packing(lengths, self.before, self.starts, attention, device)


def prompt_groups(
    sequences: Sequence[TrainSequence],
    cost: SequenceCost = BY_TOKENS,
    samples_per_row: int = 1,
    shares_prompts: bool = True,
) -> PromptGroups:
    """What balance knows of `sequences`."""
    return PromptGroups(
        [sequence.ids.shape[0] for sequence in sequences],
        [prompt_of(x) for x in sequences] if shares_prompts else [None] * len(sequences),
        [sequence.ids.shape[0] - sequence.response_tokens for sequence in sequences],
        cost,
        samples_per_row,
    )


def row_tokens(sequences: Sequence[TrainSequence], shares_prompts: bool) -> int:
    """The tokens of a row of `sequences`."""
    if not shares_prompts:
        return sum([sequence.ids.shape[0] for sequence in sequences])
    return prompt_groups(sequences).tokens_of(range(len(sequences)))


def _groups(sequences: Sequence[TrainSequence]) -> list[list[int]]:
    """The sequences that share each prompt; prompts of one alone are left out."""
    by_prompt: dict[Hashable, list[int]] = {}
    for index, sequence in enumerate(sequences):
        if (prompt := prompt_of(sequence)) is not None:
            by_prompt.setdefault(prompt, []).append(index)
    return [indices for indices in by_prompt.values() if len(indices) > 1]
