"""The memory of a rollout engine on a rank, while it generates."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

Sizes = Mapping[str, int]

_COPIED = "copied keys and values"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSizes:
    """A rollout engine; bytes besides the numbers of tokens."""

    weights: int
    token: int
    """Keys and values of a token."""
    prefill: int
    """Activations of a prefill."""
    logits: int
    """Bytes that the cache leaves free for the logits of a decode step, however it samples."""
    joined: int
    """The largest tensor that is joined of several while weights are allocated or merged."""
    buckets: int
    """Bytes of the weight switch's buckets."""
    longest: int
    """Tokens of a full sample."""
    most: int
    """Tokens of `rollout.max_running` full samples."""
    wanted: int
    """`rollout.kv_cache_tokens`."""
    passing: int = 0
    """The most bytes of weights below adapters that pass at once on their way to the host."""

    takes_all: ClassVar[bool] = False
    """Whether the cache takes all room that is left, however many tokens that are."""

    def cache_tokens(self, left: int | None) -> int:
        """Tokens of the KV cache where weights and buckets leave `left` bytes; None: no limit.

        There are those of a full sample at least.
        """
        if left is None:
            return self.wanted or self.most
        room = self.fits(left) if self.takes_all else min(self.most, self.fits(left))
        return self.wanted or max(self.longest, room)

    def fits(self, left: int) -> int:
        """Tokens for which the KV cache has room there, however few."""
        raise NotImplementedError

    def serves(self, left: int, alone: int) -> bool:
        """Whether a KV cache in `left` bytes is worth what has taken the others of `alone` bytes.

        It has the tokens that the config asks for. If it asks for none, it has at least half of
        those that it would have alone. A full sample fits in any case.
        """
        half = -(-self.cache_tokens(alone) // 2)
        return self.fits(left) >= max(self.longest, self.wanted or half)

    @property
    def idle(self) -> int:
        """Bytes that are free besides weights and cache while nothing decodes."""
        return 0

    def at_start(self, left: int | None) -> Sizes:
        """Besides the weights, once the engine is built."""
        return {"KV cache": self.cache_tokens(left) * self.token}

    def of_one_sample(self) -> Sizes:
        """What an instance that holds a full sample takes at least."""
        return {
            "generation weights": self.weights,
            "buckets": self.buckets,
            "KV cache": self.longest * self.token,
            "logits": self.logits,
            "activations": self.prefill,
        }

    def phases(self, left: int | None) -> dict[str, Sizes]:
        """Besides the weights, what each phase of generation holds, by its name."""
        raise NotImplementedError

    def on_host(self, left: int | None) -> int:
        """Bytes of keys and values in host memory, of conversations that gave way to others."""
        return 0

    @property
    def moving(self) -> int:
        """Bytes besides both layouts of the weights, while they move."""
        return max(self.buckets, self.joined)


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeSizes(GenerationSizes):
    """The native engine: its cache takes what is left, up to `most` tokens."""

    gathered: int
    """Keys and values of a token that attention copies: of a layer, or of all that a CPU keeps."""
    sampling: int
    """The part of `logits` that the run's way of sampling takes."""
    copied: int = 0
    """On CPUs, tokens whose keys and values a decode step copies; 0: those of the whole cache."""
    conversations: int = 0
    """Tokens of all conversations that an instance may have, each at full length."""
    host_tokens: int | None = None
    """`rollout.kv_host_tokens`."""
    states: int = 0
    """The states of recurrent layers, of all sequences that there is room for."""

    def fits(self, left: int) -> int:
        return max(left - self.idle - self.states, 0) // (self.token + self.gathered)

    @property
    def idle(self) -> int:
        return self.logits + self.prefill

    def of_one_sample(self) -> Sizes:
        """See `GenerationSizes`; attention copies keys and values."""
        sizes = GenerationSizes.of_one_sample(self)
        return {**sizes, _COPIED: self.longest * self.gathered, **self._states()}

    def on_host(self, left: int | None) -> int:
        """See `GenerationSizes`: of what the cache cannot hold, as much as may be there."""
        cache = self.cache_tokens(left)
        most = cache if self.host_tokens is None else self.host_tokens
        return self.token * min(most, max(0, self.conversations - cache))

    def at_start(self, left: int | None) -> Sizes:
        """See `GenerationSizes`; on a GPU the cache comes with memory for what attention copies."""
        cache = {**GenerationSizes.at_start(self, left), **self._states()}
        if left is None:
            return cache
        return {**cache, _COPIED: self.cache_tokens(left) * self.gathered}

    def phases(self, left: int | None) -> dict[str, Sizes]:
        """Prompts are read, then tokens decode.

        A decode step copies one layer's keys and values after the other, then it samples.
        """
        cache, decoding = self.at_start(left), {"logits": self.sampling}
        copied = (self.copied or self.cache_tokens(left)) * self.gathered
        if left is None and copied > self.sampling:
            decoding = {_COPIED: copied}
        return {
            "prefill": {**cache, "activations": self.prefill},
            "decode": {**cache, **decoding},
        }

    def _states(self) -> Sizes:
        return {"recurrent states": self.states} if self.states else {}


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMSizes(GenerationSizes):
    """vLLM. On a GPU it takes all that is left, and divides it by a pass that it measures.

    There the tokens of its cache are an upper bound: the peak of a step is subtracted, CUDA graphs
    and other buffers of vLLM are not.
    """

    takes_all: ClassVar[bool] = True

    def fits(self, left: int) -> int:
        return max(left - self._peak, 0) // self.token

    def at_start(self, left: int | None) -> Sizes:
        """See `GenerationSizes`. With `wanted` the cache has that size, else vLLM chooses it."""
        if left is None or self.wanted:
            cache = {"KV cache": self.cache_tokens(left) * self.token}
            return {**cache, "activations": self._peak}
        return {"KV cache and arrays of vLLM": max(left, self.longest * self.token)}

    def phases(self, left: int | None) -> dict[str, Sizes]:
        """Prompts are read in parts, while other samples decode."""
        return {"generate": self.at_start(left)}

    @property
    def _peak(self) -> int:
        """Bytes of a step, which vLLM's own pass measures before it sizes the cache."""
        return max(self.prefill, self.logits)
