"""The ids that each token of a response was drawn from, where sampling truncates the distribution.

The truncated distribution is the behavior policy (DeepSeek-V3.2, arXiv 2512.02556, section 3.1), so
training renormalizes over the same ids.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

IdArray = npt.NDArray[np.int32]
"""Token ids of rising number."""


class KeptIds:
    """The kept ids of a response's tokens, in pieces as they were drawn.

    A token that was drawn from the whole distribution, or by an environment, has none.
    """

    def __init__(self, counts: Sequence[int] = (), pieces: Sequence[IdArray] = ()) -> None:
        self._counts, self._pieces = list(counts), list(pieces)

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self._counts)

    def __eq__(self, other: object) -> bool:
        """Whether every token has the same ids."""
        return isinstance(other, KeptIds) and bool(np.array_equal(self.flat(), other.flat()))

    __hash__ = None  # type: ignore[assignment]  # it grows

    def append(self, ids: IdArray) -> None:
        """The next token was drawn from `ids`."""
        self._counts.append(len(ids))
        self._pieces.append(ids)

    def extend(self, kept: IdArray) -> None:
        """The next tokens were drawn from `kept` [tokens, most], without the -1 behind a row's."""
        inside = kept >= 0
        self._counts += inside.sum(1).tolist()
        self._pieces.append(kept[inside])

    def append_whole(self, number: int) -> None:
        """The next tokens have no kept ids."""
        self._counts += [0] * number

    def copy(self) -> "KeptIds":
        """A record that may grow by itself."""
        return KeptIds(self._counts, self._pieces)

    def flat(self) -> IdArray:
        """One array [tokens + ids]: how many ids each token has, then the ids of all of them.

        It is int32: torch cannot unpickle tensors of unsigned integers but bytes.
        """
        if len(self._pieces) > 1:
            self._pieces = [np.concatenate(self._pieces)]
        return np.concatenate([np.array(self._counts, np.int32), *self._pieces])

    @classmethod
    def of(cls, flat: IdArray, num_tokens: int) -> "KeptIds":
        """The record of `flat()`, of so many tokens."""
        return cls(flat[:num_tokens].tolist(), [flat[num_tokens:]])

    def __reduce__(self) -> tuple[Callable[..., "KeptIds"], tuple[Any, ...]]:
        # As one array: a piece for each token would be pickled alone.
        return KeptIds.of, (self.flat(), len(self))


def whole_distributions(num_tokens: int) -> KeptIds:
    """The record of so many tokens that were all drawn from the whole distribution."""
    return KeptIds([0] * num_tokens)


def rows_of(kept: torch.Tensor) -> list[IdArray]:
    """The ids of each row of `kept` [rows, width], on the host, without the -1 behind them."""
    array = kept.numpy().astype(np.int32, copy=False)
    inside = array >= 0
    ids = array[inside]  # a view of `array` would keep its padding in memory
    ends = inside.sum(1).cumsum().tolist()
    return [ids[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
