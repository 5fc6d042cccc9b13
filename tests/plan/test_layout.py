"""What `hybridrl plan layout` reports, against figures worked out by hand."""

import pytest

from hybridrl.config.layout import Grouping
from hybridrl.layout.grouping import TrainAxes
from hybridrl.layout.parameters import FIRST, LAST, Parameter
from hybridrl.layout.switching import plan_switch
from hybridrl.plan.layout import LayoutReport, Spread, report, size

PARAMETERS = [
    Parameter("embed", (64, 8), FIRST, 0),
    Parameter("0.up", (64, 8), 0, 0),
    Parameter("1.up", (64, 8), 1, 0),
    Parameter("head", (64, 8), LAST, 0),
]
MODEL = 4 * 64 * 8


def planned_report(axes: TrainAxes, pp: int, tp: int, gpus_per_node: int = 2) -> LayoutReport:
    switch = plan_switch(PARAMETERS, axes, pp, tp, Grouping.strided)
    return report(switch, itemsize=2, bucket_bytes=100, gpus_per_node=gpus_per_node)


def test_shards_that_nest() -> None:
    """Train 1 x 2 x 2, generate tp 2: each rank has a quarter and receives another one."""
    figures = planned_report(TrainAxes(fsdp=2, tp=2), 1, 2)
    quarter = MODEL // 4 * 2
    assert (figures.train, figures.gen, figures.instances) == ("1 x 1 x 2 x 2", "1 x 2", 2)
    assert (
        figures.received == figures.least == figures.sent == figures.kept == Spread(*[quarter] * 3)
    )
    assert figures.gathered.max == 2 * quarter
    assert figures.train_shard.max == MODEL // 4 * 4
    assert figures.total_received == figures.total_theory == 4 * quarter
    # Ranks 0 and 2, 1 and 3 exchange: across nodes of two, within one of four.
    assert (figures.bytes_within_nodes, figures.bytes_across_nodes) == (0, 4 * quarter)
    assert planned_report(TrainAxes(fsdp=2, tp=2), 1, 2, gpus_per_node=4).bytes_across_nodes == 0
    assert figures.scratch == 200
    assert ("  theory; ratio", "4.1 kB; 1.000") in figures.rows()


def test_nothing_to_move() -> None:
    figures = planned_report(TrainAxes(tp=2), 1, 2)
    assert figures.received.max == figures.scratch == 0
    assert ("  theory; ratio", "0 B; nothing to move") in figures.rows()


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (999, "999 B"), (17.64e9, "17.6 GB"), (3e15, "3e+03 TB")]
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


@pytest.mark.parametrize(
    ("axes", "gen_ep", "text"),
    [
        (TrainAxes(fsdp=4, ep=2), 2, "2 x 2; whole; ep crosses nodes of 2"),
        (TrainAxes(fsdp=2, tp=2, ep=2), 2, "2 x 2; whole"),
        (TrainAxes(fsdp=4), 1, "1 x 4; each cut by tp 2"),
    ],
)
def test_experts_are_reported(axes: TrainAxes, gen_ep: int, text: str) -> None:
    experts = Parameter("0.experts", (4, 8, 8), 0, 1, blocks=2, experts=4)
    switch = plan_switch([*PARAMETERS, experts], axes, 1, 2, Grouping.strided, gen_ep=gen_ep)
    rows = report(switch, 2, 100, 2).rows()
    assert ("experts, ep x fsdp; generation", text) in rows
