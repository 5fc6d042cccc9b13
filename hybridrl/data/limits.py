"""What a row must keep to be trained on: lengths, tokens, text."""

from typing import TYPE_CHECKING

from hybridrl.config import ConfigError, DataConfig
from hybridrl.data.prompts import Item
from hybridrl.data.records import UnusableRowError

if TYPE_CHECKING:
    from hybridrl.data.images import PromptImages


class RowLimits:
    """The limits of every row, for all forms of rows alike.

    A prompt has a token or more, at most `data.max_prompt_tokens`, and leaves room for the longest
    response. A response that is trained is not empty, differs from the other one of a pair, and
    fits the model's context with its prompt. Each token has a row of the embedding.
    """

    def __init__(
        self,
        config: DataConfig,
        model_path: str,
        max_context: int,
        max_new_tokens: int,
        vocab_size: int | None,
        images: "PromptImages | None" = None,
    ) -> None:
        self.config, self.max_context, self.vocab_size = config, max_context, vocab_size
        self.model_path, self.new_tokens, self.images = model_path, max_new_tokens, images
        if max_new_tokens >= max_context:
            allowed = f"less than the context, {max_context} tokens"
            raise ConfigError("rollout.max_new_tokens", max_new_tokens, allowed)

    def check(self, item: Item) -> None:
        """Raise UnusableRowError for an item that cannot be used.

        A fault of the model, which is in all rows, is another ConfigError.
        """
        where = f"{item.source}, {item.place}"
        asked = item.messages[-1] if item.task is None and item.messages else None
        is_empty = asked is not None and asked["role"] == "user" and not asked["content"]
        if is_empty or not item.prompt_ids:
            raise _skip("an empty prompt", f"or prompts with a token: {where} has an empty one")
        if (unknown := self._without_row(item)) is not None:
            allowed = (
                f"a model whose embedding has a row for each token of its tokenizer and template: "
                f"{where} has token {unknown}, the embedding {self.vocab_size} rows"
            )
            raise ConfigError("model.path", self.model_path, allowed)
        for name, ids in item.responses.items():
            if len(ids) == 1:  # the end token
                problem = f"or responses with a token: {where} has an empty {name}"
                raise _skip("an empty response", problem)
        if len(item.columns) > 1 and len(set(item.columns.values())) == 1:
            names = " and ".join(item.columns)
            problem = f"or pairs that differ: {where} has the same in {names}"
            raise _skip("a pair that does not differ", problem)
        self._check_lengths(item, where)

    def _check_lengths(self, item: Item, where: str) -> None:
        """Raise UnusableRowError for a prompt or response that is too long."""
        reason = "a prompt that is too long"
        skip = f"(or data.skip_unusable_rows=true): {where} has {item.prompt[:80]!r}"
        if item.images and self.images is not None:
            skip += f", {self.images.told(item.images)}"
        tokens = max(len(item.prompt_ids), len(item.privileged_ids))
        if tokens > (limit := self.config.max_prompt_tokens):
            allowed = f"{tokens} or more {skip}"
            raise UnusableRowError(reason, "data.max_prompt_tokens", limit, allowed)
        if tokens > self.max_context - self.new_tokens:
            allowed = (
                f"at most {self.max_context - tokens}, the model's context of {self.max_context} "
                f"less a prompt of {tokens} tokens {skip}"
            )
            raise UnusableRowError(reason, "rollout.max_new_tokens", self.new_tokens, allowed)
        if item.tokens > self.max_context:
            problem = (
                f"or prompts and responses of {self.max_context} tokens, the model's context: "
                f"{where} has {item.tokens}, {item.prompt[:80]!r}"
            )
            raise _skip("a response beyond the context", problem)

    def _without_row(self, item: Item) -> int | None:
        """A token for which the embedding has no row."""
        if self.vocab_size is None:
            return None
        ids = (item.prompt_ids, item.privileged_ids, *item.responses.values())
        largest = max((max(x) for x in ids if x), default=0)
        return largest if largest >= self.vocab_size else None


def _skip(reason: str, allowed: str) -> UnusableRowError:
    return UnusableRowError(reason, "data.skip_unusable_rows", False, f"true, {allowed}")
