"""Writes the samples of a rank to Parquet files, in a thread while the rank works."""

import importlib
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hybridrl.config.surrogates import encodable
from hybridrl.flow.ledger import Drop
from hybridrl.flow.sample import SampleId, Scalar, TokenSpan
from hybridrl.models.response_text import ResponseText
from hybridrl.telemetry import sample_files
from hybridrl.workers.store import StoredSample

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_WAITING = 2  # steps; their tensors stay in memory until they are written
_OWN_COLUMNS = ("tokens", "log_probs", "advantages")


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """All that the driver knows of a sample at the end of its step; `drop` is None if it was used.

    `task` is empty where its source has no `task_column`.
    """

    id: SampleId
    source: str
    task: str
    spans: tuple[TokenSpan, ...]
    scalars: Mapping[str, Scalar]
    drop: Drop | None


_Waiting = tuple[SampleFacts, int, Mapping[str, torch.Tensor]]
"""A sample with its response tokens and tensors."""


class SampleWriter:
    """Writes one file a step. At most two steps wait, then `put` waits for the oldest.

    What goes wrong in the thread is raised by a later `put`, or by `flush`: an OSError, or a
    RuntimeError that names file and step. No tensor of a sample is written in place, so it may be
    read here while the rank does other work.
    """

    def __init__(self, run_dir: Path, rank: int, text_of: ResponseText) -> None:
        self.run_dir, self.rank = run_dir, rank
        self._texts = TextColumns(text_of)
        self._thread = ThreadPoolExecutor(1, "samples")
        # It takes a second, so not when the first step ends.
        self._thread.submit(importlib.import_module, "pyarrow.parquet")
        self._waiting: deque[Future[None]] = deque()

    def put(
        self, step: int, phase: str, samples: Sequence[tuple[SampleFacts, StoredSample]]
    ) -> None:
        """Have the samples of a step written soon; raises what went wrong in an earlier step."""
        while len(self._waiting) >= _MOST_WAITING:
            self._waiting[0].result()  # one that has failed stays, so that `flush` raises, too
            self._waiting.popleft()
        # The store adds tensors to a sample's dict: this is what there is now.
        now = [(facts, sample.response_tokens, dict(sample.tensors)) for facts, sample in samples]
        self._waiting.append(self._thread.submit(self._write, step, phase, now))

    def flush(self) -> None:
        """Wait until all is written; raises what went wrong."""
        while self._waiting:
            self._waiting.popleft().result()

    def close(self) -> None:
        """Write what is left and end the thread."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, phase: str, samples: Sequence[_Waiting]) -> None:
        try:
            sample_files.write(self.run_dir, step, self.rank, self._columns(step, phase, samples))
        except OSError:  # has the file's name
            raise
        except Exception as error:
            path = sample_files.path_of(self.run_dir, step, self.rank)
            message = f"{path}: samples of step {step}: {type(error).__name__}: {error}"
            raise RuntimeError(message) from error

    def _columns(self, step: int, phase: str, samples: Sequence[_Waiting]) -> dict[str, Any]:
        facts = [facts for facts, _, _ in samples]
        tensors = [tensors for _, _, tensors in samples]
        prompts, responses = [], []
        for _, num_response, of_sample in samples:
            tokens = of_sample["tokens"]
            num_prompt = len(tokens) - num_response
            prompts.append(tokens[:num_prompt])
            responses.append(tokens[num_prompt:])
        return {
            "step": [step] * len(facts),
            "phase": [phase] * len(facts),
            **_fact_columns(facts),
            "prompt": self._texts.prompts([f.id.prompt for f in facts], prompts),
            "response": self._texts.responses(responses),
            "prompt_tokens": [prompt.numel() for prompt in prompts],
            "response_tokens": [response.numel() for response in responses],
            "prompt_ids": _lists(prompts, torch.int32),
            "response_ids": _lists(responses, torch.int32),
            "token_texts": self._texts.tokens(responses),
            "log_probs": _lists([t.get("log_probs") for t in tensors], torch.float32),
            "advantages": _lists([t.get("advantages") for t in tensors], torch.float32),
            "fields": [_other_tensors(of_sample) for of_sample in tensors],
        }


class TextColumns:
    """Decodes tokens; the text of each token of the vocabulary is looked up once."""

    def __init__(self, text_of: ResponseText) -> None:
        self.text_of, self.tokenizer = text_of, text_of.tokenizer
        self._of_token: dict[int, str] = {}

    def prompts(self, positions: Sequence[int], prompts: Sequence[torch.Tensor]) -> list[str]:
        """Each prompt as the model reads it; those at one position are the same."""
        texts: dict[int, str] = {}
        for position, tokens in zip(positions, prompts, strict=True):
            if position not in texts:
                texts[position] = self.tokenizer.decode(tokens.tolist())
        return [texts[position] for position in positions]

    def responses(self, responses: Sequence[torch.Tensor]) -> list[str]:
        """Each response, as judges get it."""
        return [self.text_of(tokens) for tokens in responses]

    def tokens(self, responses: Sequence[torch.Tensor]) -> "pa.Array":
        """The text of every token, special ones too, a list for each response."""
        import pyarrow as pa

        unique, places = np.unique(_joined(responses, torch.int64), return_inverse=True)
        for token in unique.tolist():
            if token not in self._of_token:
                self._of_token[token] = self._text_of(token)
        texts = pa.array([self._of_token[token] for token in unique.tolist()], pa.string())
        return pa.ListArray.from_arrays(_offsets(responses), texts.take(pa.array(places)))

    def _text_of(self, token: int) -> str:
        text = encodable(self.tokenizer.decode([token]))
        piece = self.tokenizer.convert_ids_to_tokens(token)
        # SentencePiece drops the space of a text's first word, and here each token is a text.
        starts_word = isinstance(piece, str) and piece.startswith("▁")
        return f" {text}" if starts_word and not text.startswith(" ") else text


def _fact_columns(facts: Sequence[SampleFacts]) -> dict[str, list[Any]]:
    """The columns that follow from what the driver knows."""
    return {
        "id": [str(f.id) for f in facts],
        "prompt_position": [f.id.prompt for f in facts],
        "branch": [f.id.branch for f in facts],
        "k": [f.id.k for f in facts],
        "source": [f.source for f in facts],
        "task": [f.task for f in facts],
        "reward": [_number(f.scalars.get("reward")) for f in facts],
        "advantage": [_number(f.scalars.get("advantage")) for f in facts],
        "finish": [f.scalars.get("finish") for f in facts],
        "status": ["dropped" if f.drop else "used" for f in facts],
        "drop_reason": [f.drop and f.drop.reason.value for f in facts],
        "drop_text": [f.drop and f.drop.text for f in facts],
        "spans": [[_plain(span) for span in f.spans] for f in facts],
        "scalars": [
            [
                {"name": name, "value": _number(value), "text": _text(value)}
                for name, value in f.scalars.items()
                if name not in ("advantage", "finish")
            ]
            for f in facts
        ],
    }


def _plain(span: TokenSpan) -> dict[str, Any]:
    # Not `asdict`, which takes ten times as long.
    return {name: getattr(span, name) for name in ("start", "stop", "version", "trained")}


def _other_tensors(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
    """Fields that have no column, a value a token; not the experts of a token."""
    return [
        {"name": name, "values": tensor.detach().float().numpy()}
        for name, tensor in tensors.items()
        if name not in _OWN_COLUMNS and isinstance(tensor, torch.Tensor) and tensor.dim() == 1
    ]


def _lists(rows: Sequence[torch.Tensor | None], dtype: torch.dtype) -> "pa.Array":
    """An array of lists, null where there is no tensor; the values are copied once."""
    import pyarrow as pa

    mask = pa.array([row is None for row in rows], pa.bool_())
    lists = [torch.empty(0, dtype=dtype) if row is None else row for row in rows]
    values = pa.array(_joined(lists, dtype))
    return pa.ListArray.from_arrays(_offsets(lists), values, mask=mask)


def _joined(rows: Sequence[torch.Tensor], dtype: torch.dtype) -> np.ndarray:
    return torch.cat(list(rows)).detach().to(dtype).numpy()


def _offsets(rows: Sequence[torch.Tensor]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(np.cumsum([0, *(len(row) for row in rows)]), pa.int32())


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _text(value: Any) -> str | None:
    """A string, or the numbers of a conversation's turns."""
    if isinstance(value, list):
        return " ".join(f"{number:.6g}" for number in value)
    return value if isinstance(value, str) else None
