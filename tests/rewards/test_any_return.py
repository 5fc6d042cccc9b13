"""Whatever a reward function returns: the number it means, or a failure that says so."""

import math
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hybridrl.config import RewardConfig, RewardKind
from hybridrl.rewards.functions import Signature, UserFunction, user_function
from hybridrl.rewards.labels import label
from hybridrl.rewards.results import RewardInput, result_of

FUNCTIONS = {
    Signature.own: "def f(response): pass",
    Signature.own_batch: "def f(responses): pass",
    Signature.verl: "def f(data_source, solution_str, ground_truth, extra_info=None): pass",
    Signature.verl_batch: "def f(data_sources, solution_strs, ground_truths, extra_infos): pass",
    Signature.trl: "def f(completions, **kwargs): pass",
}
NUMBER = st.floats() | st.integers() | st.booleans() | st.sampled_from([1e18, -1e18, 1e19, 10**400])
SCALAR = NUMBER | st.sampled_from(
    [np.float32(0.5), np.bool_(True), np.int64(3), np.float64("nan"), np.array(2.0)]
)
VALUE = SCALAR | st.sampled_from(
    [None, "1", "", b"1", 1j, object(), np.array([1.0]), np.array([]), {}, [], (), [1.0],
     {"score": 1}, {"score": None}, {"score": [1]}, {"reward": 1}, {1: 2}]
)  # fmt: skip


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> dict[Signature, UserFunction]:
    """A function of each signature, in a file."""
    loaded = {}
    for signature, source in FUNCTIONS.items():
        file = tmp_path_factory.mktemp(signature.name) / "mine.py"
        file.write_text(source)
        config = RewardConfig(kind=RewardKind.function, function=f"{file}:f")
        loaded[signature] = user_function(config)
        assert loaded[signature].signature is signature
    return loaded


def meant(value: Any, signature: Signature) -> float | None:
    """The number that one value stands for; None where it stands for none."""
    if signature in (Signature.verl, Signature.verl_batch) and isinstance(value, dict):
        value = value.get("score")
    if isinstance(value, np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and abs(number) <= 1e18 else None


@settings(max_examples=150, deadline=None)
@given(signature=st.sampled_from(list(Signature)), values=st.lists(VALUE, max_size=3))
@example(signature=Signature.own, values=[10**400])
@example(signature=Signature.trl, values=[10**400, 1.0])
def test_a_return_is_its_number_or_a_failure(
    functions: dict[Signature, UserFunction], signature: Signature, values: list[Any]
) -> None:
    function, texts = functions[signature], ["x"] * (len(values) or 1)
    pairs: list[tuple[Any, list[str], list[Any]]] = [(value, ["x"], [value]) for value in values]
    if signature.is_of_several:
        pairs = [(values, texts[: len(values)], values)]
    for returned, judged, each in pairs:
        results = [result_of(answer) for answer in function.answers(returned, judged)]
        assert len(results) == len(judged)
        for result, value in zip(results, each, strict=True):
            number = meant(value, signature)
            assert (result.status == "ok") is (number is not None)
            assert result.reward == (number or 0.0)
            assert bool(result.message) is (number is None)


@settings(max_examples=60, deadline=None)
@given(returned=VALUE | st.lists(SCALAR, max_size=4))
def test_a_batch_with_other_than_a_number_for_each_response_is_an_error(
    functions: dict[Signature, UserFunction], returned: Any
) -> None:
    """The worker makes it a failure of each response: the error has a message."""
    for signature in (Signature.own_batch, Signature.verl_batch, Signature.trl):
        is_list = isinstance(returned, list | tuple | np.ndarray) and np.ndim(returned) == 1
        if is_list and len(returned) == 2:
            continue
        with pytest.raises((TypeError, ValueError), match="the function returned"):
            functions[signature].answers(returned, ["x", "y"])


def test_rows_reach_every_signature(functions: dict[Signature, UserFunction]) -> None:
    """Its arguments are those of its parameters, whatever the row has."""
    item = RewardInput("p", "r", "a", {"prompt": None, "response": 3, "kwargs": 1, "a b": 2,
                                        "data_source": None})  # fmt: skip
    for signature, function in functions.items():
        arguments = function.arguments([item], ["r"])
        assert arguments, Path(signature.name)
        function.function(**arguments)


@pytest.mark.parametrize(
    ("value", "reward"),
    [(True, 1.0), (False, -1.0), (1, 1.0), (0, -1.0), (None, None), ("no", None)],
)
def test_a_label_of_a_row_is_a_reward(value: Any, reward: float | None) -> None:
    """As TRL's unpaired preferences have it, in JSON or as a number."""
    if reward is None:
        with pytest.raises(ValueError, match="wanted true or false"):
            label("x", {"label": value})
        return
    assert label("x", {"label": value}) == reward
