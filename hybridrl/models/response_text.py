"""The text of a response, as judges, environments and records get it."""

import re
from typing import Any

from transformers import PreTrainedTokenizerFast

MARKER = re.compile(
    r"think|thought|reason|tool|function|python_tag|channel|constrain|call|args|action|plugin",
    re.IGNORECASE,
)
"""Names of tokens around thoughts and calls: `<think>`, `[TOOL_CALLS]`, `<|channel|>`, ..."""
_OF_CHANNELS = ("<|start|>", "<|message|>", "<|end|>")
"""What goes with `<|channel|>` (gpt-oss)."""
_ENDS = ("<|call|>", "<|return|>")
"""Ends of a response, whatever their name says (gpt-oss)."""


class ResponseText:
    """Decodes responses, with those special tokens that are `kept`, by id.

    `skips` is `rollout.skip_special_tokens`: null keeps the markers of thoughts and calls that the
    tokenizer has as special tokens, true none. False keeps all but eos, what begins or pads a text,
    and those after which nothing comes but for markers: the end of a turn.
    """

    def __init__(self, tokenizer: Any, skips: bool | None = None) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder.items()
        special = {int(id): str(token) for id, token in added if token.special}
        special |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        has_channels = "<|channel|>" in special.values()
        ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.bos_token_id}

        def keeps(id: int, token: str) -> bool:
            if skips or id in ends or token in _ENDS:
                return False
            of_channels = has_channels and token in _OF_CHANNELS
            return skips is False or of_channels or MARKER.search(token) is not None

        self.kept = {id: token for id, token in sorted(special.items()) if keeps(id, token)}
        # The call of transformers' tokenizers looks for arrays of every framework, at each text.
        plain, own = PreTrainedTokenizerFast, type(tokenizer)
        is_plain = own._decode is plain._decode and own.decode is plain.decode
        cleans = tokenizer.clean_up_tokenization_spaces
        self._fast = tokenizer.backend_tokenizer if is_plain and not cleans else None
        self._left_out = frozenset(special.keys() - self.kept.keys())
        self._ends = {id for id, token in self.kept.items() if not MARKER.search(token)}
        self._ends -= {id for id, token in self.kept.items() if token in _OF_CHANNELS}

    def __call__(self, ids: Any) -> str:
        """The text of the tokens of a response, a list or a tensor."""
        ids = ids if isinstance(ids, list) else ids.tolist()
        if not self.kept:
            return self._decoded(ids, True)
        kept = [id for id in ids if id not in self._left_out]
        while kept and kept[-1] in self._ends:
            kept.pop()
        return self._decoded(kept, False)

    def _decoded(self, ids: list[int], skips: bool) -> str:
        if self._fast is not None:
            return str(self._fast.decode(ids, skip_special_tokens=skips))
        return str(self.tokenizer.decode(ids, skip_special_tokens=skips))
