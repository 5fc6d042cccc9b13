import pytest

from hybridrl.checkpoint.keep import to_keep


@pytest.mark.parametrize(
    ("scores", "keep_last", "kept"),
    [
        ({}, 2, set()),
        ({10: 0.5, 20: 0.9, 30: 0.7, 40: 0.8}, 2, {20, 30, 40}),
        ({10: 0.5, 20: 0.9, 30: 0.7, 40: 0.8}, 0, {20}),
        ({10: 0.9, 20: 0.9}, 0, {10}),
        ({10: None, 20: None, 30: None}, 1, {30}),
        ({10: None, 20: 0.1, 30: None}, 1, {20, 30}),
    ],
)
def test_best_and_last(scores, keep_last, kept):
    assert to_keep(scores, keep_last) == kept


def test_negative_is_refused():
    with pytest.raises(ValueError, match=r"trainer\.keep_last=-1"):
        to_keep({}, -1)
