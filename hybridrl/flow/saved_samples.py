"""Commands about samples that outlive their process: those that finish, and those that have."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.flow.sample import SampleId


@dataclass(frozen=True, slots=True)
class SaveFinished:
    """Append each sample that finishes in this call to a file of its rank in `folder`.

    `attempt` numbers the processes that have begun the step: each has files of its own.
    """

    folder: str
    attempt: int
    ids = ()


@dataclass(frozen=True, slots=True)
class TakeSaved:
    """These samples of one prompt are finished: an earlier process has saved them.

    `places` are opaque to schedules: where their records are. `prompt` is that of `Submit`.
    """

    places: Mapping[SampleId, Any]
    prompt: Any

    @property
    def ids(self) -> tuple[SampleId, ...]:
        """The samples that are taken."""
        return tuple(self.places)


SavingCommand = SaveFinished | TakeSaved
