"""Recipes as dataflows over streams, and the schedules that run them.

Pure Python, without torch or Ray, so a schedule runs on a virtual clock as it does on ranks. Start
from `Flow` (`recipe.py`: the operations that a recipe calls), `Graph` (`graph.py`: its stages) and
`Schedule` (`schedules/base.py`: one step of them).
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
