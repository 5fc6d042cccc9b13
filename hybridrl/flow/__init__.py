"""Recipes as dataflows over streams, and the schedules that run them. Pure Python."""

from hybridrl.flow.graph import Copy, Graph, Stage
from hybridrl.flow.recipe import Flow, Recipe, RecipeState, recipe
from hybridrl.flow.sample import Sample, SampleId, TokenSpan
from hybridrl.flow.stream import Prompts, Stream

__all__ = [
    "Copy",
    "Flow",
    "Graph",
    "Prompts",
    "Recipe",
    "RecipeState",
    "Sample",
    "SampleId",
    "Stage",
    "Stream",
    "TokenSpan",
    "recipe",
]
