"""Tensors of a model as its hub checkpoints have them: other names, and one tensor an expert."""

from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    rename_source_key,
    revert_weight_conversion,
)

from hybridrl.models.image_text import whole_name


class HubNames:
    """transformers' conversions of `model` (`parallel.meta_model`), reversed, as it saves.

    Example: a layer's `mlp.experts.gate_up_proj` becomes `mlp.experts.0.gate_proj.weight`,
    `mlp.experts.0.up_proj.weight`, and so on.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        whole: PreTrainedModel | None = None,
        kept: Collection[str] = (),
    ) -> None:
        """Names of `model`, or of the model for images and text whose text part it is: the `whole`.

        Tensors that are called `kept` have these names in the checkpoint.
        """
        self._of_text, self._kept = whole is not None, frozenset(kept)
        model = whole or model
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        mapping = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
        self._model = model
        # transformers then looks for them once, not for each group.
        self._model._weight_conversions = mapping or None
        backwards = [entry.reverse_transform() for entry in reversed(mapping)]
        self._converters = [entry for entry in backwards if isinstance(entry, WeightConverter)]

    def converted(
        self, names: Iterable[str], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors `tensors`, called `names`, under their hub names and in their hub shapes.

        What one conversion takes is kept until it is there: at most a few tensors of a layer.
        """
        for _, results in self.conversions(names, tensors):
            yield from results.items()

    def conversions(
        self, names: Iterable[str], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[list[str], dict[str, torch.Tensor]]]:
        """Each conversion of `converted`: the names that it takes, and its results."""
        groups = self._groups(names)
        waiting: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            waiting[name] = tensor
            if all(other in waiting for other in groups[name]):
                group = {other: waiting.pop(other) for other in groups[name]}
                del tensor
                if name in self._kept:
                    yield groups[name], group
                    continue
                named = {self._name(other): values for other, values in group.items()}
                yield groups[name], dict(revert_weight_conversion(self._model, named))
        assert not waiting, f"without the others of their conversion: {', '.join(waiting)}"

    def _groups(self, names: Iterable[str]) -> Mapping[str, list[str]]:
        """The names that are converted together, by each of them."""
        by_key: dict[str, list[str]] = {}
        groups = {}
        for name in names:
            if name in self._kept:
                groups[name] = [name]
                continue
            key, pattern = rename_source_key(self._name(name), [], self._converters)
            groups[name] = by_key.setdefault(name if pattern is None else key, [])
            groups[name].append(name)
        return groups

    def _name(self, name: str) -> str:
        return whole_name(name) if self._of_text else name
