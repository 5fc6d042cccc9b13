"""The options of the group `recipe`: a recipe's module is imported when the recipe is chosen."""

import functools

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig

from hybridrl.config import composition
from hybridrl.config.recipe_folder import with_defaults


class RecipeNode(ConfigNode):
    """A recipe as Hydra's store has it: its settings are read at the first use of `node`."""

    def __init__(self, name: str, yaml: DictConfig) -> None:
        self.name, self.group, self.package = f"{name}.yaml", "recipe", None
        self.provider = "hybridrl.recipes"
        self.settings = functools.cache(functools.partial(with_defaults, yaml))

    # The store hands out copies of this object: they share `settings`, each has a `node`.
    @functools.cached_property
    def node(self) -> DictConfig:  # type: ignore[override]
        """The yaml on top of the defaults of the recipe's dataclass."""
        return self.settings()


def add_recipe(name: str, yaml: DictConfig) -> None:
    """Make the recipe of this `yaml` known to Hydra, as `recipe=NAME`."""
    recipes = ConfigStore.instance().repo.setdefault("recipe", {})
    recipes[f"{name}.yaml"] = RecipeNode(name, yaml)
    composition.forget()
