"""Philox against Random123's known answers; streams of samples."""

import numpy as np
import pytest

from hybridrl.engines.rollout.random import philox4x32, stream_key, uniforms

# Random123, tests/kat_vectors, "philox4x32 10": counter, key, result.
VECTORS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
]  # fmt: skip


def words(text: str) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "result"), VECTORS)
def test_known_answers(counter: str, key: str, result: str) -> None:
    assert tuple(philox4x32(words(counter), words(key))) == words(result)  # type: ignore[arg-type]


def test_uniforms_are_uniform_and_independent_of_batching() -> None:
    keys = np.array([stream_key(0, prompt) for prompt in range(50)], np.uint64)
    together = uniforms(keys[:, None], np.arange(400))
    assert together.min() >= 0
    assert together.max() < 1
    # Kolmogorov-Smirnov: 1.95 / sqrt(n) is exceeded with probability 0.001.
    ordered, num = np.sort(together.ravel()), together.size
    assert np.abs(ordered - (np.arange(num) + 0.5) / num).max() < 1.95 / np.sqrt(num)
    assert abs(np.corrcoef(together[:, :-1].ravel(), together[:, 1:].ravel())[0, 1]) < 0.03
    assert uniforms(keys[7:8], np.array([123]))[0] == together[7, 123]


def test_stream_key_depends_on_every_part() -> None:
    parts = [(0, 1, "", 0), (1, 1, "", 0), (0, 2, "", 0), (0, 1, "g", 0), (0, 1, "", 1)]
    keys = [stream_key(*identity) for identity in parts]
    assert len(set(keys)) == len(parts)
    assert all(0 <= key < 2**64 for key in keys)
    assert keys[0] == stream_key(0, 1)
    assert stream_key(3, 5, "g", 2) == 16395475902104896341  # as in runs of earlier versions
