"""The work of one call of an instance, which cost models learn from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """The work that a call of an instance did, for the cost model.

    `admitted` samples began or resumed, `preempted` ones lost their KV cache. `rows` sums the
    samples over the decode steps, `cached` the tokens that they attended to. `drafted` tokens were
    guessed, and count as rows; `accepted` of them were right, and `refused` drafts had one that was
    not. `kv_tokens` are those whose keys and values were packed or unpacked, in `kv_seconds` of the
    whole. `kv_bytes` came from other ranks. Of the tokens that held samples had cached when they
    continued, `kept_tokens` still were, and `recomputed_tokens` had given way to others.
    `moved_tokens` gave way to host memory. New weights of `load_bytes` took `load_seconds`, besides
    the rest, of which `proof_seconds` were spent on comparing them with those that were sent.
    """

    seconds: float = 0.0
    decode_steps: int = 0
    rows: int = 0
    cached: int = 0
    prefill_tokens: int = 0
    kv_tokens: int = 0
    kv_seconds: float = 0.0
    admitted: int = 0
    preempted: int = 0
    drafted: int = 0
    accepted: int = 0
    refused: int = 0
    kv_bytes: int = 0
    kept_tokens: int = 0
    moved_tokens: int = 0
    recomputed_tokens: int = 0
    load_seconds: float = 0.0
    load_bytes: int = 0
    proof_seconds: float = 0.0

    def name(self, wide: bool = False) -> str:
        """What the call was, for the trace: with drafts, how many of them were right."""
        if self.drafted:
            return f"{'wide ' * wide}verify {self.accepted}/{self.drafted}"
        return "wide decode" if wide else "generate"

    @property
    def tokens_of_row(self) -> float:
        """Tokens that a row has made, on average over the rows."""
        if not self.drafted:
            return float(self.decode_steps)
        return self.decode_steps * (1 + self.accepted / (self.rows - self.drafted))


NO_WORK = Work()
