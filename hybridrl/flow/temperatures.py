"""The temperature of each stage: that which its samples were drawn with."""

from dataclasses import replace

from hybridrl.flow.graph import AnswersStage, GenerateStage, Graph, JoinStage, Stage


def with_temperatures(graph: Graph, temperature: float) -> Graph:
    """`graph` with the `temperature` of rollouts in the stages that read what was drawn with it.

    A stage of its own temperature has that one, a greedy one 1. Responses of the dataset were not
    drawn: there it is 1, and a loss is the model's cross-entropy. Raises ValueError for a stage
    that would read samples of several temperatures in one pass.
    """
    drawn_with: dict[str, frozenset[float]] = {}
    stages: dict[str, Stage] = {}
    for name, stage in graph.stages.items():
        # A join lends scalars to the first stream, whose samples stay what they are.
        upstream = stage.upstream[:1] if isinstance(stage, JoinStage) else stage.upstream
        own = frozenset[float]().union(*(drawn_with[other] for other in upstream))
        if isinstance(stage, GenerateStage):
            drawn = stage.sampling.temperature
            own = frozenset({(temperature if drawn is None else drawn) or 1.0})
        elif isinstance(stage, AnswersStage):
            own = frozenset({1.0})
        if len(own) > 1 and stage.role is not None:
            told = " and ".join(f"{value:g}" for value in sorted(own))
            raise ValueError(f"stage {name!r} reads samples of temperatures {told} in one pass")
        drawn_with[name] = own
        stages[name] = replace(stage, temperature=next(iter(own))) if len(own) == 1 else stage
    return Graph(stages, graph.copies, graph.states)
