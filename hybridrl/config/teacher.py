"""The model that a recipe distils from."""

from collections.abc import Collection
from dataclasses import dataclass, field

from hybridrl.config.errors import ConfigError


@dataclass(kw_only=True, slots=True)
class TeacherConfig:
    """A frozen model that reads the actor's samples, for recipes that have a teacher."""

    path: str | None = None
    """A Hugging Face directory or hub name, with the actor's tokenizer. Null: the actor as the
    recipe starts, which teaches nothing but runs."""
    by_source: dict[str, str] = field(default_factory=dict)
    """Other teachers for the prompts of some of `data.sources`, by its names; each as `path`."""

    @property
    def paths(self) -> dict[str, str]:
        """The teachers' own models, by their keys."""
        own = {f"teacher.by_source.{name}": path for name, path in self.by_source.items()}
        return own if self.path is None else {"teacher.path": self.path, **own}

    def check(self, sources: Collection[str]) -> None:
        """Raise ConfigError for a teacher of a source that is none of the `sources`."""
        for name in self.by_source:
            if name not in sources:
                raise ConfigError("teacher.by_source", name, f"one of {', '.join(sorted(sources))}")
