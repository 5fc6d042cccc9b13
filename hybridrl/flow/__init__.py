"""Recipes as dataflows over streams, and the schedules that run them. Pure Python."""

from hybridrl.flow.graph import Copy, Graph, Kind, Stage
from hybridrl.flow.recipe import Flow, Recipe, State, recipe
from hybridrl.flow.sample import Sample, SampleId, Span
from hybridrl.flow.stream import Prompts, Stream

__all__ = [
    "Copy",
    "Flow",
    "Graph",
    "Kind",
    "Prompts",
    "Recipe",
    "Sample",
    "SampleId",
    "Span",
    "Stage",
    "State",
    "Stream",
    "recipe",
]
