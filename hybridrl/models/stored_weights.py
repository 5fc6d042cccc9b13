"""A model's weights as they are stored, under the names and in the shapes that transformers has.

Hub checkpoints may have other names, and one tensor an expert. Which becomes what is transformers'
own conversion mapping; here its operations get `StoredTensor`s, so nothing is read until a box is.
"""

import copy
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from hybridrl.config import ConfigError
from hybridrl.layout.box import Box
from hybridrl.layout.local import LocalTensor
from hybridrl.models.buffers import persistent_buffers
from hybridrl.models.image_text import KeptTensors, own_name, whole_model
from hybridrl.models.parallel import meta_model
from hybridrl.models.quantized import dequantized
from hybridrl.models.stages import head_name
from hybridrl.models.stored_tensor import (
    NotBySlices,
    StoredTensor,
    in_file,
    read_whole,
    stored_zeros,
)
from hybridrl.models.weight_files import first_few, open_file, weight_files

Source = tuple[str, str]
"""The pattern of a conversion that a stored tensor's name has, and that name."""


_OLD_BUFFERS = (
    r"rotary_emb\.inv_freq$",
    r"(^|\.)position_ids$",
    r"\.masked_bias$",
    r"\.attn\.bias$",
)
"""Buffers that older versions of transformers stored."""
_COMPARED = 1 << 24
"""Elements of a tensor that are compared at a time."""


class StoredWeights:
    """The weights at a path, which `fill` reads box by box: a context, in which files are open.

    Example: `with StoredWeights(path, config) as weights: weights.fill(local, name, held)`.
    """

    def __init__(
        self,
        path: str,
        config: PretrainedConfig,
        *,
        classifier: bool = False,
        zeros: Collection[str] = (),
        key: str = "model.path",
    ) -> None:
        """Open the files of a causal language model, or `classifier`, of `config`.

        Parameters in `zeros` are zeros where no file has them. Raises ConfigError, which names
        `key`, where weights are missing, of another shape, or in no file that can be read. A hub's
        model is checked as `check_stored` checks a directory.
        """
        self.path, self.key = path, key
        self._model = meta_model(config, classifier)
        self._whole: PreTrainedModel | None = None
        """The model for images and text whose text part this is; None for other models."""
        self._files = ExitStack()
        try:
            self._whole = whole_model(path)
            self._stored = self._open()
            self._tensors = self._converted()
        except OSError as error:
            self._files.close()
            raise ConfigError(key, path, f"a model with *.safetensors ({error})") from error
        for name in zeros:
            shape = self._model.get_parameter(name).shape
            self._tensors.setdefault(name, stored_zeros(shape))
        self._check()
        if not Path(path).is_dir():  # a hub's model, which no preflight has seen
            self.check_left_out()

    def __enter__(self) -> "StoredWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def __contains__(self, name: str) -> bool:
        """Whether these are weights of a parameter or buffer `name`."""
        return self._tied(name) in self._tensors

    def kept(self) -> KeptTensors:
        """The tensors of a checkpoint for images and text that do not train.

        A frozen tower, and what transformers ignores: heads that predict several tokens.
        """
        if self._whole is None:
            return KeptTensors({})
        parameters = self._model.state_dict()
        trained = {
            name
            for target, (_, sources) in conversions(self._whole, self._stored).items()
            if own_name(target) in parameters
            for _, name in sources
        }
        return KeptTensors({n: x for n, x in self._stored.items() if n not in trained})

    @torch.no_grad()
    def fill(self, tensor: torch.Tensor, name: str, held: LocalTensor) -> None:
        """Copy the boxes `held` of a parameter to `tensor`; padding in them becomes zeros."""
        stored = self._tensor(name)
        for box in held.boxes:
            unpadded = box.intersect(Box.whole(stored.shape))
            if unpadded != box:
                tensor[held.slices(box)].zero_()
            if unpadded is not None:
                stored.copy_to(tensor[held.slices(unpadded)], unpadded)

    @torch.no_grad()
    def fill_buffers(self, model: PreTrainedModel) -> None:
        """Copy the persistent buffers of `model`, which may be a part of the whole; others stay."""
        for name, buffer in persistent_buffers(model).items():
            if name in self:  # else the family computes it
                stored = self._tensor(name)
                stored.copy_to(buffer, Box.whole(stored.shape))

    def buffers(self) -> dict[str, torch.Tensor]:
        """The persistent buffers that are stored, by name, on the host."""
        buffers = {}
        for name, buffer in persistent_buffers(self._model).items():
            if name in self:  # else the family computes it
                buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
                self._tensor(name).copy_to(buffers[name], Box.whole(tuple(buffer.shape)))
        return buffers

    def _tensor(self, name: str) -> StoredTensor:
        return self._tensors[self._tied(name)]

    def _tied(self, name: str) -> str:
        """The name under which files have a parameter: that of another one that it is tied to."""
        if name not in self._tensors:
            for other, source in self._model.all_tied_weights_keys.items():
                if source == name and other in self._tensors:
                    return str(other)
        return name

    def _open(self) -> dict[str, Any]:
        """The slices of the stored tensors, by their own names."""
        opened: dict[Path, Any] = {}
        stored = {}
        for name, file in weight_files(self.path).items():
            if file not in opened:
                opened[file] = self._files.enter_context(open_file(file))
            stored[name] = opened[file].get_slice(name)
        return dequantized(stored, self.path)

    def _converted(self) -> dict[str, StoredTensor]:
        """The tensors by transformers' names; raises OSError for what no conversion takes."""
        stored = {n: in_file(x, torch.Size(x.get_shape())) for n, x in self._stored.items()}
        tensors: dict[str, StoredTensor] = {}
        model = self._whole or self._model
        for target, (converter, sources) in conversions(model, self._stored).items():
            if converter is None:
                tensors[target] = stored[sources[0][1]]
                continue
            try:
                tensors |= self._convert(converter, target, sources, stored)
            except NotBySlices:
                tensors |= self._convert_whole(converter, target, sources)
            except (ValueError, IndexError) as error:
                raise OSError(f"{target} cannot be made of its tensors: {error}") from error
        if self._whole is None:
            return tensors
        return {own: x for name, x in tensors.items() if (own := own_name(name)) is not None}

    def _convert(
        self,
        converter: WeightConverter,
        target: str,
        sources: Iterable[Source],
        tensors: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What the conversion that gives `target` makes of `tensors`, by name."""
        conversion = copy.deepcopy(converter)
        for pattern, name in sources:
            conversion.add_tensor(target, name, pattern, tensors[name])
        model = self._whole or self._model
        results = conversion.convert(target, model=model, config=model.config)
        return {name: x[0] if isinstance(x, list) else x for name, x in results.items()}

    def _convert_whole(
        self, converter: WeightConverter, target: str, sources: list[Source]
    ) -> dict[str, StoredTensor]:
        """As `_convert`, by reading the whole of these tensors each time that a box is read."""
        inputs = {name: self._stored[name] for _, name in sources}
        empty = {n: torch.empty(x.get_shape(), device="meta") for n, x in inputs.items()}

        def read(name: str) -> torch.Tensor:
            whole = {n: x[...] for n, x in inputs.items()}
            result = self._convert(converter, target, sources, whole)[name]
            assert isinstance(result, torch.Tensor)
            return result

        shapes = self._convert(converter, target, sources, empty)
        return {name: read_whole(partial(read, name), x.shape) for name, x in shapes.items()}

    def _check(self) -> None:
        """Raise ConfigError where a parameter or persistent buffer is missing or of another shape.

        Buffers that transformers computes where files lack them may be missing.
        """
        model, missing = self._model, []
        computed = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
        buffers = persistent_buffers(model)
        for name, tensor in (*model.named_parameters(), *buffers.items()):
            if name not in self:
                if name not in buffers or not any(pattern.search(name) for pattern in computed):
                    missing.append(name)
            elif self._tensor(name).shape != tensor.shape:
                shape = list(self._tensor(name).shape)
                self._refuse(f"weights of the config's shapes ({name}: {shape})")
        if missing:
            self._refuse(f"complete weights; missing: {first_few(sorted(missing))}")

    def check_left_out(self) -> None:
        """Raise ConfigError for a stored tensor that is read nowhere and is not known as harmless.

        Harmless are those that transformers ignores, and a causal model's head below a value model.
        So is a tied weight that equals its pair. transformers loads a pair that differs as two
        weights, whatever the config says.
        """
        model, read_as = self._model, self._whole or self._model
        converted = conversions(read_as, self._stored).values()
        used = {name for _, sources in converted for _, name in sources}
        ignored = {*(read_as._keys_to_ignore_on_load_unexpected or ()), *_OLD_BUFFERS}
        if head_name(model) == "score":
            ignored.add(r"^lm_head\.")
        patterns = [re.compile(pattern) for pattern in ignored]
        unused = self._stored.keys() - used
        left = [name for name in unused if not any(pattern.search(name) for pattern in patterns)]
        if left:
            known = "the weights of the config's model alone; it has no use for"
            self._refuse(f"{known} {first_few(sorted(left))}")
        for name, source in model.all_tied_weights_keys.items():
            if name in self._tensors and source in self._tensors and not self._equal(name, source):
                allowed = (
                    f"equal {name} and {source}, which tie_word_embeddings=true makes one, or "
                    "false in config.json"
                )
                self._refuse(allowed)

    def _equal(self, name: str, other: str) -> bool:
        """Whether two stored tensors are equal, read a few rows at a time."""
        one, two = self._tensors[name], self._tensors[other]
        if one.shape != two.shape:
            return False
        rows = max(1, _COMPARED // max(1, one.shape[1:].numel()))
        for start in range(0, one.shape[0], rows):
            box = Box.whole(one.shape).narrow(0, start, min(start + rows, one.shape[0]))
            ours, theirs = torch.empty(box.shape), torch.empty(box.shape)
            one.copy_to(ours, box)
            two.copy_to(theirs, box)
            if not torch.equal(ours, theirs):
                return False
        return True

    def _refuse(self, allowed: str) -> None:
        self._files.close()
        raise ConfigError(self.key, self.path, allowed)


def check_stored(
    path: str,
    config: PretrainedConfig,
    *,
    classifier: bool = False,
    zeros: Collection[str] = (),
    key: str = "model.path",
) -> None:
    """Raise as `StoredWeights` does, for a directory, and where a tensor of it would be left out.

    Ranks fetch a hub's model and check it as they open it.
    """
    if Path(path).is_dir():
        with StoredWeights(path, config, classifier=classifier, zeros=zeros, key=key) as weights:
            weights.check_left_out()


def conversions(
    model: PreTrainedModel, names: Iterable[str]
) -> dict[str, tuple[WeightConverter | None, list[Source]]]:
    """How transformers makes the tensors of `model` from stored ones called `names`.

    By the name of the first tensor that a conversion gives: the conversion, None for a mere
    renaming, and what it takes, in its order. Names that the model has no use for are left out.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    known, prefix = dict.fromkeys(model.state_dict(), True), model.base_model_prefix
    targets: dict[str, tuple[WeightConverter | None, list[Source]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, known)
        if target not in known and name in known:
            target, pattern = rename_source_key(name, [], [], prefix, known)
        if target in known:
            converter = None if pattern is None else by_pattern[pattern]
            targets.setdefault(target, (converter, []))[1].append((pattern or name, name))
    return targets
