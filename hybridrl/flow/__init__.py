"""Recipes as dataflows over streams, and what a schedule runs them against.

Pure Python, without torch or Ray. Start from `Flow` (`recipe.py`: the operations that a recipe
calls) and `Graph` (`graph.py`: its stages).
"""

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
