"""The interface of a loss, for its readers: recipes, preflight, ranks, the train engine.

It stands here, free of torch, because a recipe's graph names losses and has no torch either.
"""

import abc
from typing import Generic, TypeVar

Tensor = TypeVar("Tensor")


class Loss(abc.ABC, Generic[Tensor]):
    """A policy or supervised loss: pure, picklable, one value per response token.

    A subclass overrides a default by a class attribute, a dataclass field or a property. Losses in
    torch are `Loss[torch.Tensor]`.

    - `normalize`: how tokens are weighted into the batch loss, over all ranks and micro-batches
      (`hybridrl.algorithms.normalize`).
    - `samples_per_row`: so many consecutive sequences are looked at together and share a
      micro-batch.
    - `candidates`: the field with token ids [response_tokens, num_candidates] whose
      log-probabilities the loss reads besides the response's own. They come as the field
      `candidate_log_probs` [tokens, num_candidates], with gradient, in place of the ids.
    - `needs_last_token_only`: a model with a value head is read at each sequence's last token
      instead of before every response token.
    """

    normalize: str = "token"
    samples_per_row: int = 1
    needs_last_token_only: bool = False
    candidates: str | None = None
    num_candidates: int = 0

    @property
    def fields(self) -> tuple[str, ...]:
        """Names that must be in `TrainSequence.fields`."""
        return ()

    @property
    def needs_entropy(self) -> bool:
        """Whether `entropy` must be computed with gradient."""
        return False

    @property
    def totals_are_factor(self) -> bool:
        """Whether the batch's totals are one factor of the token weights, to be applied last.

        Of a user's own normalization that is not known.
        """
        return ":" not in self.normalize

    @property
    def on_policy(self) -> bool:
        """Whether it has no ratio to an old policy: one optimizer step on fresh samples."""
        return False

    def lr_scale(self, share: float) -> float | None:
        """The factor of the learning rate where responses are worth `share` of their number.

        None changes nothing.
        """
        return None

    @abc.abstractmethod
    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, fields: dict[str, Tensor], /
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Per-token loss [tokens] and per-token metrics [tokens], to be averaged by the engine.

        `fields` has those of `self.fields`, and `sequence` [tokens], int64: the number of a
        token's sequence in the micro-batch. They are numbered in the order of the update, so
        sequence i is of row i // samples_per_row; one without trained tokens has its number, too.
        """
