"""Samples of a step that died with their instance: what the step can do about it."""

from collections.abc import Collection
from typing import Any

from hybridrl.flow.sample import SampleId


class InstanceDied(RuntimeError):
    """A generation instance has died in a step, which cannot go on without what it had."""


class SamplesDied(RuntimeError):
    """Samples that a step has taken have died with their instance, before anything read them."""


def not_died(
    waiting: set[tuple[str, SampleId]], died: Collection[SampleId], whole_groups: bool
) -> set[tuple[str, SampleId]]:
    """Return the stages and samples for which results come, in spite of those that died.

    Of stages of `whole_groups` none comes for a prompt with one of them.
    """
    gone: set[Any] = {id.prompt if whole_groups else id for id in died}
    return {(name, id) for name, id in waiting if (id.prompt if whole_groups else id) not in gone}
