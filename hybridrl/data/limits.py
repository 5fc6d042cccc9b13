"""What a row must keep to be trained on: lengths, tokens, text."""

from dataclasses import dataclass

from hybridrl.config import ConfigError, DataConfig
from hybridrl.data.prompts import Item


@dataclass(frozen=True, slots=True)
class UnusableRow:
    """Why a row cannot be used."""

    reason: str
    """In a few words, to count by."""
    error: ConfigError
    """The refusal that names the key to change."""
    may_be_skipped: bool = True
    """Whether `data.skip_unusable_rows` leaves it out: a fault of the model is in all rows."""


class RowLimits:
    """The limits of every row, for all forms of rows alike.

    A prompt has a token or more, at most `data.max_prompt_tokens`, and leaves room for the longest
    response. A prompt and a target (or another response that is trained) fit
    the model's context. Each token has a row of the embedding.
    """

    def __init__(
        self,
        config: DataConfig,
        max_context: int,
        max_new_tokens: int,
        vocab_size: int | None,
    ) -> None:
        self.config, self.max_context, self.vocab_size = config, max_context, vocab_size
        self.new_tokens = max_new_tokens
        if max_new_tokens >= max_context:
            allowed = f"less than the context, {max_context} tokens"
            raise ConfigError("rollout.max_new_tokens", max_new_tokens, allowed)

    def obstacle(self, item: Item) -> UnusableRow | None:
        """Why the item cannot be used; None where it can."""
        skip = f"(or data.skip_unusable_rows=true): {item.source} has {item.prompt[:80]!r}"
        if not item.prompt_ids:
            allowed = f"true, or prompts with a token: {item.source} has an empty one, {item.place}"
            return UnusableRow("an empty prompt", _skip(allowed))
        if (unknown := self._without_row(item)) is not None:
            allowed = (
                f"a model whose embedding has a row for each token of its tokenizer and template: "
                f"{item.source} has token {unknown} ({item.place}), the embedding {self.vocab_size}"
            )
            error = ConfigError("model.path", "the tokenizer", allowed)
            return UnusableRow("a token without an embedding", error, may_be_skipped=False)
        tokens = max(len(item.prompt_ids), len(item.privileged_ids))
        if tokens > self.config.max_prompt_tokens:
            limit = self.config.max_prompt_tokens
            error = ConfigError("data.max_prompt_tokens", limit, f"{tokens} or more {skip}")
            return UnusableRow("a prompt that is too long", error)
        if tokens > self.max_context - self.new_tokens:
            allowed = (
                f"at most {self.max_context - tokens}, the model's context of {self.max_context} "
                f"less a prompt of {tokens} tokens {skip}"
            )
            error = ConfigError("rollout.max_new_tokens", self.new_tokens, allowed)
            return UnusableRow("a prompt that is too long", error)
        if item.tokens > self.max_context:
            allowed = (
                f"true: {item.source} has a prompt and response of {item.tokens} tokens, of which "
                f"the model's context holds {self.max_context}: {item.prompt[:80]!r}, {item.place}"
            )
            return UnusableRow("a response beyond the context", _skip(allowed))
        return None

    def _without_row(self, item: Item) -> int | None:
        """A token for which the embedding has no row."""
        if self.vocab_size is None:
            return None
        ids = (item.prompt_ids, item.target_ids, item.privileged_ids, *item.columns.values())
        largest = max((max(x) for x in ids if x), default=0)
        return largest if largest >= self.vocab_size else None


def _skip(allowed: str) -> ConfigError:
    return ConfigError("data.skip_unusable_rows", False, allowed)
