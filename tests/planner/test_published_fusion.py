"""RLHFuse's iterations under the planner's costs."""

from hybridrl.planner.published_fusion import compare, remarks, table


def test_fusion_is_sooner_and_no_sooner_than_the_bound() -> None:
    """One pair: updates together, generation with inference, and all of it."""
    one = compare("33b", "13b", 512)
    assert 1.05 < one.training <= one.training_bound * (1 + 1e-9)
    assert 0.99 < one.front < 1.2
    low, high = sorted((one.training, one.front))
    assert low < one.iteration < high
    head, line = table([one])
    assert len(head) == len(line)
    assert "published: 1.2 to 1.3" in remarks([one])[1]
