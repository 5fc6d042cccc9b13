"""The logits that tokens are drawn from, where they are not the model's: vLLM's penalties and bans.

In vLLM's order (its `Sampler`): bad words and a shortest response forbid tokens, biases are added.
Then come the penalties for repetition, frequency and presence, before the temperature. All of it
depends on the row's own tokens alone. So parking, moving and batching change nothing.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hybridrl.engines.rollout.device_copies import upload
from hybridrl.engines.rollout.interface import Request, SamplingParams

_Ints = npt.NDArray[np.int64]


class SeenTokens:
    """Tokens of the prompts and responses of running requests, one row a slot, on the device.

    A row is `ids` and, of each, its number in the response, replies of a conversation aside. Equal
    ids of a row have equal numbers, and its first id pads it. So a scatter of values that follow
    from ids and numbers is well defined, though ids occur more than once.

    *Example.* Prompt 7 8 7, response 8 9 8: ids 7 8 9 8 7 7, numbers 0 2 1 2 0 0.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        self._ids = torch.zeros(slots, 1, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(slots, 1, device=device)
        self._used: _Ints = np.zeros(slots, np.int64)  # columns
        self._counts: _Ints = np.full(slots, -1)  # response tokens that are in; -1 unknown

    def forget(self, slots: Sequence[int]) -> None:
        """Invalidate these slots, which get other requests."""
        self._counts[list(slots)] = -1

    def update(
        self, requests: Sequence[Request], slots: _Ints, counts: _Ints
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and numbers [rows, width] of `requests` in `slots`, with `counts` response tokens."""
        behind = np.where(self._counts[slots] < 0, -1, counts - self._counts[slots])
        for row in np.flatnonzero((behind < 0) | (behind > 1)).tolist():
            self._fill(requests[row], int(slots[row]), int(counts[row]))
        grown = np.flatnonzero(behind == 1)
        if len(grown):
            tokens = [requests[row].response_ids[counts[row] - 1] for row in grown.tolist()]
            self._append(slots[grown], tokens)
        width = int(self._used[slots].max())
        index = upload({"slots": slots}, self._ids.device)["slots"]
        return self._ids[index, :width], self._numbers[index, :width]

    def _fill(self, request: Request, slot: int, count: int) -> None:
        response = request.response_ids[:count]
        starts = [turn.start for turn in request.turns] + [request.turn_start]
        stops = [turn.stop for turn in request.turns] + [count]
        numbers = Counter(
            token
            for start, stop in zip(starts, stops, strict=True)
            for token in response[start:stop]
        )
        ids = list(dict.fromkeys((*request.prompt_ids, *response)))
        self._widen(len(ids))
        self._ids[slot] = ids[0]
        self._ids[slot, : len(ids)] = torch.tensor(ids)
        self._numbers[slot] = float(numbers[ids[0]])
        self._numbers[slot, : len(ids)] = torch.tensor([float(numbers[id]) for id in ids])
        self._used[slot], self._counts[slot] = len(ids), count

    def _append(self, slots: _Ints, tokens: Sequence[int]) -> None:
        """Add a response token to each slot."""
        self._widen(int(self._used[slots].max()) + 1)
        arrays = {"columns": self._used[slots], "rows": slots, "new": np.array(tokens)}
        columns, rows, new = upload(arrays, self._ids.device).values()
        equal, numbers = self._ids[rows] == new[:, None], self._numbers[rows]
        number = numbers.where(equal, 0.0).amax(1) + 1
        self._numbers[rows] = number[:, None].where(equal, numbers)
        self._ids[rows, columns], self._numbers[rows, columns] = new, number
        self._used[slots] += 1
        self._counts[slots] += 1

    def _widen(self, width: int) -> None:
        spare = width - self._ids.shape[1]
        if spare > 0:
            spare = max(spare, self._ids.shape[1])
            self._ids, self._numbers = (
                torch.cat((table, table[:, :1].expand(-1, spare)), 1)
                for table in (self._ids, self._numbers)
            )


def barred(
    logits: torch.Tensor, ids: Sequence[int], edited: torch.Tensor | None
) -> torch.Tensor | None:
    """The `edited` logits, or new ones, without tokens that no row draws; None without any edit.

    Both are [rows, vocab]; `edited` are changed in place.
    """
    if not ids:
        return edited
    edited = logits.clone() if edited is None else edited
    for id in ids:  # a list as an index would be copied to the device
        edited[:, id] = -torch.inf
    return edited


@dataclass(slots=True)
class _Alike:
    """Rows of equal parameters.

    `ids` and `values` are added to their logits; `barred` are not drawn before `min_new_tokens`.
    `words` are bad words of several tokens.
    """

    rows: _Ints
    min_new_tokens: int
    ids: torch.Tensor
    values: torch.Tensor
    barred: torch.Tensor
    words: list[tuple[int, ...]]


class LogitEdits:
    """How the rows of a batch differ from the model's logits; at least one does."""

    def __init__(self, params: Sequence[SamplingParams], device: torch.device) -> None:
        rows: dict[SamplingParams, list[int]] = {}
        for row, sampling in enumerate(params):
            if sampling.edits_logits:
                rows.setdefault(sampling, []).append(row)
        self._device = device
        self._alike = [self._of(sampling, of_it) for sampling, of_it in rows.items()]
        self._penalties: list[torch.Tensor] | None = None
        if any(sampling.has_penalty for sampling in rows):
            names = "repetition_penalty", "frequency_penalty", "presence_penalty"
            table = [[getattr(sampling, name) for sampling in params] for name in names]
            self._penalties = list(torch.tensor(table, device=device)[..., None].unbind(0))

    def _of(self, sampling: SamplingParams, rows: list[int]) -> _Alike:
        # A word of one token is never drawn, whatever came before.
        banned = [word[0] for word in sampling.bad_words if len(word) == 1]
        added = dict(sampling.logit_bias) | dict.fromkeys(banned, -torch.inf)
        barred = [*sampling.stop_token_ids, *sampling.ignored_stop_ids]
        return _Alike(
            rows=np.array(rows),
            min_new_tokens=sampling.min_new_tokens,
            ids=torch.tensor(list(added), dtype=torch.int64, device=self._device),
            values=torch.tensor(list(added.values()), device=self._device),
            barred=torch.tensor(barred, dtype=torch.int64, device=self._device),
            words=[word for word in sampling.bad_words if len(word) > 1],
        )

    def apply(
        self,
        logits: torch.Tensor,
        requests: Sequence[Request],
        slots: _Ints,
        counts: _Ints,
        seen: SeenTokens,
    ) -> torch.Tensor:
        """New logits [rows, vocab] float32, of `requests` in `slots` with `counts` tokens."""
        logits = logits.to(torch.float32, copy=True)
        for alike in self._alike:
            self._forbid(logits, alike, requests, counts)
            if len(alike.ids):
                logits[self._column(alike.rows), alike.ids] += alike.values
        if self._penalties is not None:
            repetition, frequency, presence = self._penalties
            ids, numbers = seen.update(requests, slots, counts)
            own = logits.gather(1, ids)
            own = own * torch.where(own > 0, 1 / repetition, repetition)
            own -= frequency * numbers
            own -= presence * (numbers > 0)
            logits.scatter_(1, ids, own)
        return logits

    def _forbid(
        self, logits: torch.Tensor, alike: _Alike, requests: Sequence[Request], counts: _Ints
    ) -> None:
        """Ends before the shortest response, and last tokens of bad words."""
        early = alike.rows[counts[alike.rows] < alike.min_new_tokens]
        if len(early):
            logits[self._column(early), alike.barred] = -torch.inf
        rows, tokens = [], []
        for row in alike.rows.tolist() if alike.words else []:
            response, count = requests[row].response_ids, int(counts[row])
            for *before, last in alike.words:
                if response[max(0, count - len(before)) : count] == before:
                    rows.append(row)
                    tokens.append(last)
        if rows:
            logits[rows, tokens] = -torch.inf

    def _column(self, rows: _Ints) -> torch.Tensor:
        return upload({"rows": rows}, self._device)["rows"][:, None]
