"""HybridFlow's setting under the search."""

import pytest

from hybridrl.controller.mapping_command import run_paper
from hybridrl.planner.published_mappings import (
    PUBLISHED,
    PUBLISHED_TP,
    generate,
    place,
    remarks,
    table,
)


def test_on_few_gpus_all_roles_share_them_as_published() -> None:
    """13B on 16 GPUs: the order of the placements, and what is printed."""
    one, generated = place("13b", "13b", 16, PUBLISHED["13b", 16]), generate("7b")
    colocate, split, alone = (
        one.seconds[name] or 0.0 for name in ("colocate", "split", "standalone")
    )
    assert 0 < colocate < split < alone
    assert one.best == one.published
    assert {sum(ranks.values()) for ranks in one.ranks.values()} == {16}
    assert generated.best < 8
    assert generated.saved > 0
    head, line = table([one])
    assert len(head) == len(line)
    assert "(published: tp 2, 60.3%)" in remarks([one], [generated])[1]


@pytest.mark.slow
def test_all_of_the_paper() -> None:
    """Its best placement up to 64 GPUs; the allocations of the largest cases are printed."""
    lines, said, data = run_paper(["--paper=hybridflow"])
    assert len(lines) == 1 + len(PUBLISHED) + 1
    placed = data["hybridflow"]["placements"]
    for one in placed[:-1]:
        if one["gpus"] <= 64:
            assert one["best"] == one["published"]
    alone = next(
        x["ranks"]["standalone"] for x in placed if (x["actor"], x["gpus"]) == ("13b", 128)
    )
    assert sum(alone.values()) == 128
    assert said[1].startswith("standalone of 13B on 128 GPUs: actor ")
    assert said[2].startswith("13B with a 70B critic alone: actor ")
    assert said[2].endswith("(published: critic 64)")
    assert len(data["hybridflow"]["generation"]) == len(PUBLISHED_TP)
