"""`hybridrl plan auto` chooses ranks that generate alone exactly where its rule says so."""

from collections.abc import Iterator, Sequence

import pytest

from hybridrl.config import AsyncScheduleConfig, ConfigError
from hybridrl.costs.mapping import ACTOR, DeviceMapping
from hybridrl.plan import mapping_command
from hybridrl.plan.mapping_report import MappingReport
from hybridrl.plan.mapping_search import TOLERANCE
from hybridrl.plan.mapping_split import GAIN, ROLLOUT, PricedSplit, SplitResults, SplitSearch

pytestmark = pytest.mark.long

TINY = (
    *("recipe=grpo", "cluster.device=cpu", "data.max_prompt_tokens=64", "data.size=50"),
    *("data.eval_size=8", "cluster.memory_check=warn", "--nodes=1", "--gpus-per-node=4"),
    *("--gpu=h100", "--number=3", "--seconds=20"),
)
LENGTHS = "--lengths=lognormal:median=60,sigma=0.8"
LONG = (LENGTHS, "rollout.max_new_tokens=192", "trainer.prompts_per_step=2")
"""The longest sample takes longer than all else."""
BUSY = (
    *("model=qwen3_1.7b", "cluster.device=cuda", "trainer.epochs=4", "trainer.prompts_per_step=64"),
    *("rollout.max_new_tokens=24", "--lengths=lognormal:median=8,sigma=0.1"),
)
"""Training takes nearly all of a step: what separate ranks save is about what they lack."""


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[SplitSearch]:
    """The searches for a split of a command."""
    searched: list[SplitSearch] = []

    class Kept(SplitSearch):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            searched.append(self)

    monkeypatch.setattr(mapping_command, "SplitSearch", Kept)
    return searched


def mappings(search: SplitSearch, max_staleness: int) -> Iterator[DeviceMapping]:
    """Each split and generation layout, with the quickest training of the other ranks."""
    yield from filter(None, map(search._trained, search._frames(max_staleness)))


def seconds_of(report: MappingReport, alone: bool) -> list[float]:
    """Steps of the report's mappings with ranks that generate alone, or without, ascending."""
    mappings = report.result.best
    return [one.seconds.step_s for one in mappings if (ROLLOUT in one.mapping.pools) is alone]


@pytest.mark.parametrize(
    ("args", "max_staleness", "wins"),
    [
        (LONG, 0, False),
        (LONG, 1, True),
        (LONG, 2, True),
        (BUSY, 0, False),
        (BUSY, 1, False),
        ((*BUSY, "trainer.epochs=1"), 1, True),
        ((*LONG, "recipe=ppo"), 1, True),
    ],
)
def test_separate_ranks_are_chosen_where_their_step_is_shorter_by_three_percent(
    args: Sequence[str], max_staleness: int, wins: bool, searches: list[SplitSearch]
) -> None:
    """Every split is replayed here, and none of those that the command left out is quicker."""
    report = mapping_command.run([*TINY, *args, f"--max-staleness={max_staleness}"])
    (search,) = searches
    steps = [search.price(mapping).step_s for mapping in mappings(search, max_staleness)]
    assert len(steps) >= 3
    shared_s = seconds_of(report, alone=False)[0]
    assert (min(steps) <= (1 - GAIN) * shared_s) is wins
    chosen = seconds_of(report, alone=True)
    assert len(chosen) == wins
    if wins:
        assert report.result.best[0].seconds.step_s == chosen[0] <= min(steps) * (1 + TOLERANCE)
        assert "schedule=async" in report.overrides[0]
        assert f"schedule.max_staleness={max_staleness}" in report.overrides[0]
    (line,) = report.separate
    assert f"ranks that generate alone {'win' if wins else 'lose'}: " in line
    assert ("--max-staleness=1 lets steps overlap" in line) is (max_staleness == 0)
    assert ("the search was not through" in line) is (
        report.separate_rest_s != {max_staleness: None}
    )
    assert line in report.remarks()


def test_no_step_is_below_the_terms_that_the_line_names(searches: list[SplitSearch]) -> None:
    for max_staleness in (0, 1, 4):
        mapping_command.run([*TINY, *LONG, f"--max-staleness={max_staleness}"])
        search = searches[-1]
        for mapping in mappings(search, max_staleness):
            split = search.price(mapping)
            assert split.step_s >= max(split.terms.values()) * (1 - 1e-9)
            assert split.priced.bound_s == max(split.terms.values())


def test_a_search_that_time_has_ended_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One split is replayed, and no other takes less than the line says."""
    splits: list[PricedSplit] = []

    class Hurried(SplitSearch):
        def run(self, max_staleness: int, budget_s: float = 60.0) -> SplitResults:
            splits.extend(self.price(mapping) for mapping in mappings(self, max_staleness))
            return super().run(max_staleness, 0.0)

    monkeypatch.setattr(mapping_command, "SplitSearch", Hurried)
    report = mapping_command.run([*TINY, *LONG, "--max-staleness=1"])
    (line,) = report.separate
    rest_s = report.record()["separate_rest_s"][1]
    assert f"the search was not through: what is left takes {rest_s:.3g} s a step" in line
    others = sorted(split.step_s for split in splits if split.step_s != report.separate_s[1])
    assert len(others) > 1
    assert rest_s <= others[0]


def test_each_staleness_has_its_share_of_the_time_that_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ones before take none here. One that is given twice is searched once."""
    shares: list[float] = []

    class Quick(SplitSearch):
        def run(self, max_staleness: int, budget_s: float = 60.0) -> SplitResults:
            shares.append(budget_s)
            return SplitResults([])

    monkeypatch.setattr(mapping_command, "SplitSearch", Quick)
    report = mapping_command.run([*TINY, *LONG, "--max-staleness=0,4,4,1"])
    assert len(shares) == 3
    assert shares[0] < shares[1] < shares[2]
    assert report.separate == [
        f"with max_staleness={most} ranks that generate alone are not tried:"
        " no split of these ranks fits"
        for most in (0, 4, 1)
    ]


def test_training_ranks_have_layouts_that_fill_them(searches: list[SplitSearch]) -> None:
    mapping_command.run([*TINY, *LONG, "recipe=ppo"])
    (search,) = searches
    for mapping in mappings(search, 1):
        assert sum(mapping.ranks.values()) == 4
        assert all(layout.ranks == mapping.ranks[ACTOR] for layout in mapping.train.values())
        assert mapping.ranks[ROLLOUT] % mapping.gen.ranks == 0


def test_the_quickest_staleness_is_taken_and_costs_by_hand_what_the_search_says() -> None:
    report = mapping_command.run([*TINY, *LONG, "--max-staleness=0,2,1"])
    best = report.result.best[0]
    assert report.separate_s.keys() == {0, 1, 2}
    assert not any("lets steps overlap" in line for line in report.separate)
    assert [
        f"max_staleness={most}" in line
        for most, line in zip((0, 2, 1), report.separate, strict=True)
    ] == [True] * 3
    assert best.seconds.step_s == min(report.separate_s.values()) < report.shared_s
    args = [arg for arg in (*TINY, *LONG) if "number" not in arg]
    again = mapping_command.run([*args, *report.overrides[0], "--price"])
    (priced,) = again.result.best
    assert priced.mapping.ranks == best.mapping.ranks
    assert isinstance(priced.mapping.schedule, AsyncScheduleConfig)
    assert priced.seconds.step_s == pytest.approx(best.seconds.step_s, rel=1e-9)


def test_recipes_that_need_their_own_weights_are_not_tried() -> None:
    report = mapping_command.run([*TINY, *LONG, "recipe=rloo", "--max-staleness=1"])
    (line,) = report.separate
    assert "with max_staleness=1 ranks that generate alone are not tried: the recipe runs" in line
    assert not seconds_of(report, alone=True)


def test_what_has_no_price_is_refused() -> None:
    pools = ("cluster.ranks=4", "cluster.pools.actor=2", "cluster.pools.rollout=2")
    with pytest.raises(ConfigError, match=r"cluster\.pools\.rollout.*others have no price"):
        mapping_command.run([*TINY, *LONG, *pools, "schedule=serial", "--price"])
