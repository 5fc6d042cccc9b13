"""`Flow`, which a recipe is called with, and the `recipe` decorator."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from hybridrl.flow.graph import AnswersStage, CollectStage, Copy, CopyUpdate, Graph, PromptsStage
from hybridrl.flow.roles import (
    ActorHandle,
    CriticHandle,
    Judge,
    ReferenceHandle,
    Reward,
    RoleHandle,
    Teacher,
    WeightCopy,
)
from hybridrl.flow.roles import source as make_source
from hybridrl.flow.stream import Prompts, Stream

ROLES = ("actor", "reference", "critic", "reward", "cost", "cost_critic", "teacher")


class RecipeState:
    """One number of the recipe's own that lives in the driver and is checkpointed.

    Functions of `by_group` and `by_batch` read and set it; a function of `map` runs on a rank and
    gets it as a scalar field instead.
    """

    def __init__(self, graph: Graph, name: str) -> None:
        self._graph = graph
        self.name = name

    def get(self) -> float:
        """The present value."""
        return self._graph.states[self.name]

    def set(self, value: float) -> None:
        """Replace the value, from now on."""
        self._graph.states[self.name] = float(value)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"recipe state {self.name!r} lives in the driver and cannot be sent to a rank; "
            "make it a field with by_batch"
        )


class Flow:
    """The roles and the data of a recipe. Calls on it build `graph`; nothing runs."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.graph.add(PromptsStage(name="prompts"))

    @property
    def prompts(self) -> Prompts:
        """The run's prompts, in order."""
        return Prompts(self.graph)

    @property
    def answers(self) -> Stream:
        """The dataset's answers as responses: supervised training."""
        return self.targets()

    def targets(
        self, column: str | None = None, *, name: str | None = None, of_next: bool = False
    ) -> Stream:
        """A column of the dataset as responses, one per prompt; None is the answer.

        Adds the tensor `tokens` and the scalar `finish`. The `name`, by default the column's, is
        the samples' branch. With `of_next` a prompt has the response of the next one of the batch,
        the last that of the first: responses whatever the prompt (KTO).
        """
        return make_source(
            self.prompts,
            AnswersStage(
                name=name or column or "answers",
                upstream=("prompts",),
                outputs=("finish", "tokens"),
                scalars=("finish",),
                branch=name or column or "",
                column=column,
                of_next=of_next,
            ),
        )

    @property
    def actor(self) -> ActorHandle:
        """The policy that is trained and that generates."""
        return ActorHandle("actor")

    @property
    def reference(self) -> ReferenceHandle:
        """The policy as it was at the start."""
        return ReferenceHandle("reference")

    @property
    def critic(self) -> CriticHandle:
        """The value model."""
        return CriticHandle("critic")

    @property
    def reward(self) -> Reward:
        """The verifier, or the reward model."""
        return Reward("reward")

    @property
    def cost(self) -> Judge:
        """The cost of a response (Safe-RLHF)."""
        return Judge("cost")

    @property
    def cost_critic(self) -> CriticHandle:
        """The value model of the cost."""
        return CriticHandle("cost_critic", field="cost_values")

    @property
    def teacher(self) -> Teacher:
        """The model to distil from."""
        return Teacher("teacher")

    def copy(
        self,
        of: RoleHandle,
        *,
        update: CopyUpdate = "frozen",
        decay: float = 0.0,
        name: str | None = None,
    ) -> WeightCopy:
        """A second set of a role's weights: `frozen` at the start, or an `ewma` of every update.

        After an update an ewma copy is `decay * copy + (1 - decay) * weights`, 0 < decay < 1.
        """
        copy_name = name or f"{of.role}_{update}"
        if update not in ("frozen", "ewma"):
            raise ValueError(f"copy {copy_name!r}: got update={update!r}, wanted frozen or ewma")
        if (update == "ewma") != (0 < decay < 1):
            raise ValueError(
                f"copy {copy_name!r}: got update={update!r} with decay={decay}, "
                "wanted 0 < decay < 1 for ewma and no decay for frozen"
            )
        if copy_name in ROLES:
            raise ValueError(
                f"copy {copy_name!r}: the name is a role's; wanted another than {', '.join(ROLES)}"
            )
        if copy_name in self.graph.copies:
            raise ValueError(f"two copies are named {copy_name!r}: wanted another name (name=...)")
        self.graph.copies[copy_name] = Copy(copy_name, of.role, update, decay)
        return WeightCopy(copy_name)

    def state(self, name: str, initial: float) -> RecipeState:
        """A checkpointed number of the recipe's own (a multiplier, an adaptive coefficient)."""
        if name in self.graph.states:
            raise ValueError(
                f"two recipe states are named {name!r}: taken are {sorted(self.graph.states)}"
            )
        self.graph.states[name] = float(initial)
        return RecipeState(self.graph, name)

    def collect(self, stream: Stream, *, name: str | None = None) -> None:
        """End a stream that is looked at and not trained on: evaluation."""
        stage_name = name or stream.stage_name("collect")
        stream.then(CollectStage(name=stage_name, upstream=(stream.stage,)))


@dataclass(frozen=True)
class Recipe:
    """A recipe: call it with a `Flow` and its config, or `build` its graph."""

    name: str
    function: Callable[[Flow, Any], None]

    def __call__(self, flow: Flow, cfg: Any) -> None:
        """Append the recipe's stages to `flow`."""
        self.function(flow, cfg)

    def build(self, cfg: Any) -> Graph:
        """The recipe's graph; raises `ValueError` for its author's errors."""
        flow = Flow()
        self.function(flow, cfg)
        flow.graph.check()
        return flow.graph


def recipe(name: str) -> Callable[[Callable[[Flow, Any], None]], Recipe]:
    """Mark a function `(flow, cfg)` as the recipe `name`."""
    return lambda function: Recipe(name, function)
