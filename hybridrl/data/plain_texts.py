"""The tokens of texts without a chat template."""

from collections.abc import Sequence
from typing import Any

from hybridrl.data.left_out import RowNotes
from hybridrl.data.records import SourceRecord
from hybridrl.models.control_tokens import ControlTokens


class PlainTexts:
    """The tokens of texts without a chat template, in which control tokens may be spelled.

    Where whole texts are trained they have no prompt: what begins a text stands in its place.
    """

    def __init__(
        self,
        records: Sequence[SourceRecord],
        tokenizer: Any,
        notes: RowNotes,
        empty: tuple[int, ...],
    ) -> None:
        """A prompt without tokens is `empty`."""
        self.records, self.tokenizer, self.notes = records, tokenizer, notes
        self.empty = empty
        self.control = ControlTokens(tokenizer)

    def prompts(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Prompts, with what the tokenizer puts before a text and without its end."""
        eos = self.tokenizer.eos_token_id  # some tokenizers close every text, and so the response
        encoded = self.tokenizer(list(texts), verbose=False)["input_ids"]
        bare = [tuple(ids[:-1] if ids and ids[-1] == eos else ids) for ids in encoded]
        return [ids or self.empty for ids in bare]

    def answers(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Responses, without the end that the user may have written."""
        eos = self.tokenizer.eos_token or "\n"
        bare = [text.removesuffix(eos) for text in texts]
        self.note("responses", bare)
        encoded = self.tokenizer(bare, add_special_tokens=False, verbose=False)["input_ids"]
        return [tuple(ids) for ids in encoded]

    def note(self, what: str, texts: Sequence[str]) -> None:
        """Note control tokens that texts of the rows spell."""
        for record, text in zip(self.records, texts, strict=True):
            if token := self.control.spelled(text):
                self.notes.add(
                    f"data.chat=false, and {what} have control tokens such as {token!r}, which "
                    "are tokens there", record.place,
                )  # fmt: skip
