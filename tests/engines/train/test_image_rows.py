"""Packed rows of samples with and without images, against each sample alone in transformers."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_prompts import FAMILIES, A, B, C, ImageModel, image_model, tolerance
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybridrl.config import Attention
from hybridrl.engines.probe import compare_gradients
from hybridrl.engines.train.image_rows import check_images_came
from hybridrl.engines.train.interface import TrainSequence, ended
from hybridrl.engines.train.packed import PackedBatch, PackedModel, pack
from hybridrl.engines.train.replica import Replica
from hybridrl.models import packed_attention
from hybridrl.models.flops import TowerFlops
from hybridrl.models.image_text import meta_tower, text_name
from hybridrl.models.load import load_config, load_value_config
from hybridrl.models.recurrent import use_batches
from hybridrl.models.stages import prepare_training, whole

Models = Callable[[str], tuple[ImageModel, PackedModel]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    models: dict[str, tuple[ImageModel, PackedModel]] = {}

    def model_of(family: str) -> tuple[ImageModel, PackedModel]:
        if family not in models:
            model = image_model(family, tmp_path_factory.mktemp(family))
            text = AutoModelForCausalLM.from_config(
                load_config(str(model.path)), attn_implementation=packed_attention.NAME
            )
            named = {text_name(name): tensor for name, tensor in model.whole.state_dict().items()}
            text.load_state_dict({name: x for name, x in named.items() if name is not None})
            use_batches(text)
            models[family] = model, PackedModel(whole(prepare_training(text)))
        return models[family]

    return model_of


def samples(model: ImageModel) -> list[TrainSequence]:
    """Prompts with an image, two, none; two that are equal but for the picture, and a group."""
    prompts = [(4, (A,), 0), (12, (), 1), (3, (B, A), 2), (4, (C,), 0), (4, (A,), 0)]
    sequences = []
    for number, (length, images, seed) in enumerate(prompts):
        prompt = model.prompt(length, images, seed)
        response = torch.randint(3, 59, (5,), generator=torch.Generator().manual_seed(number))
        sequences.append(
            TrainSequence(torch.tensor([*prompt, *response.tolist()]), 5, images=images)
        )
    return sequences


def row_of(
    model: ImageModel, sequences: list[TrainSequence], shares_prompts: bool = False
) -> PackedBatch:
    return pack(
        sequences,
        Attention.torch,
        torch.device("cpu"),
        total_tokens=160,
        shares_prompts=shares_prompts,
        tower=lambda: model.tower,
    )


def log_probs(packed: PackedModel, row: PackedBatch) -> list[torch.Tensor]:
    """Return those of each sequence, in the order of the caller's."""
    values, _ = packed(row.ids, row)
    pieces = dict(zip(row.order, values.split(row.counts), strict=True))
    return [pieces[number] for number in range(len(pieces) - (-1 in pieces))]


@pytest.mark.parametrize(
    ("family", "shares_prompts"),
    [*((family, False) for family in FAMILIES), ("qwen3_vl", True), ("qwen3_vl_moe", True)],
)
def test_rows_are_each_sample_alone(models: Models, family: str, shares_prompts: bool) -> None:
    model, packed = models(family)
    sequences = samples(model)
    weights = [torch.randn(5, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    wanted = [model.log_probs(x.ids, x.images, 5) for x in sequences]
    row = row_of(model, sequences, shares_prompts)
    assert (row.num_shared > 0) == shares_prompts
    got = log_probs(packed, row)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance(family), rtol=0)
    for module in (model.whole, packed):
        module.zero_grad()
    for values in (got, wanted):
        (torch.cat(values) * torch.cat(weights)).sum().backward()
    of_whole = {
        own: p.grad
        for name, p in model.whole.named_parameters()
        if p.grad is not None and (own := text_name(name)) is not None
    }
    own = {name: p.grad for name, p in packed.model.named_parameters()}
    assert compare_gradients(own, of_whole) is None
    assert all(p.grad is None for p in model.tower._model.parameters())


@pytest.mark.parametrize("family", FAMILIES[:3])  # transformers has no value model of the last
def test_values_of_rows_are_each_sample_alone(models: Models, family: str) -> None:
    """A critic's, of the states before the response's tokens, with their gradients."""
    model, _ = models(family)
    critic = AutoModelForSequenceClassification.from_config(
        load_value_config(str(model.path)), attn_implementation=packed_attention.NAME
    )
    named = {text_name(name): tensor for name, tensor in model.whole.state_dict().items()}
    own_names = set(critic.state_dict())
    critic.load_state_dict({n: x for n, x in named.items() if n in own_names}, strict=False)
    use_batches(critic)
    packed, sequences = PackedModel(whole(prepare_training(critic))), samples(model)
    got = log_probs(packed, row_of(model, sequences))
    head = critic.score.weight.detach()[0]
    wanted = []
    for sequence in sequences:
        inputs = model.inputs(sequence.ids, sequence.images)
        states = model.whole.model(**inputs, use_cache=False).last_hidden_state[0]
        wanted.append(states[-6:-1] @ head)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance(family), rtol=0)
    for module in (model.whole, packed):
        module.zero_grad()
    weights = torch.randn(25, generator=torch.Generator().manual_seed(0))
    for values in (got, wanted):
        (torch.cat(values) * weights).sum().backward()
    of_whole = {
        own: p.grad
        for name, p in model.whole.named_parameters()
        if p.grad is not None and (own := text_name(name)) is not None
    }
    own = {name: p.grad for name, p in critic.named_parameters() if name != "score.weight"}
    assert compare_gradients(own, of_whole) is None


def test_a_prompt_that_lost_its_images_is_named(models: Models) -> None:
    model, _ = models("qwen3_vl")
    sequences, pads = samples(model), [60, 61]
    check_images_came(sequences, pads)
    written = replace(sequences[1], ids=torch.tensor([5] * 4 + [60]), response_tokens=1)
    check_images_came([written], pads)  # a response is text, whatever it spells
    check_images_came([ended(written, None)], pads)  # neither is it where its end is read
    sequences[2] = replace(sequences[2], images=())
    wanted = r"^sequence 2 of 5, of 37 tokens, has 19 pads of images, and no images came with it$"
    with pytest.raises(ValueError, match=wanted):
        check_images_came(sequences, pads)


def test_exchanged_pictures_change_these_two_alone(models: Models) -> None:
    model, packed = models("qwen3_vl")
    sequences = samples(model)
    exchanged = list(sequences)
    exchanged[0], exchanged[3] = (
        replace(sequences[0], images=(C,)),
        replace(sequences[3], images=(A,)),
    )
    before, after = (log_probs(packed, row_of(model, x)) for x in (sequences, exchanged))
    moved = [float((a - b).detach().abs().max()) for a, b in zip(before, after, strict=True)]
    assert min(moved[0], moved[3]) > 1e-2
    assert max(moved[1], moved[2], moved[4]) < 1e-6


@pytest.mark.parametrize("fault", ["positions of one number", "no DeepStack", "other features"])
def test_a_fault_is_seen(models: Models, fault: str) -> None:
    """What `test_rows_are_each_sample_alone` must not pass."""
    model, packed = models("qwen3_vl")
    sequences = samples(model)
    row = row_of(model, sequences)
    assert row.images is not None
    if fault == "positions of one number":
        row = replace(row, position_ids=row.position_ids[0])
    elif fault == "no DeepStack":
        row = replace(row, images=replace(row.images, features=row.images.features[:, :1]))
    else:
        row = replace(row, images=replace(row.images, features=row.images.features.flip(0)))
    got, wanted = log_probs(packed, row)[0], model.log_probs(sequences[0].ids, (A,), 5)
    assert float((got - wanted).detach().abs().max()) > 1e-3


def test_an_update_counts_the_tower_for_each_sample(models: Models) -> None:
    """Forward alone, and in a column apart: backward of a frozen tower has no operations."""
    model, _ = models("qwen3_vl")
    sequences = samples(model)
    of_tower = TowerFlops.of(meta_tower(load_config(str(model.path))))
    patches = {A: 6 * 6, B: 10 * 4, C: 6 * 6}
    want = sum(of_tower(patches[image]) for own in sequences for image in own.images)
    assert sum(model.tower.flops(own.images) for own in sequences) == want
    replica: Any = SimpleNamespace(_tower=lambda: model.tower, device=torch.device("cpu"))
    counts = Replica.count(replica, sequences, 1, lambda tokens, scored: 0)  # type: ignore[arg-type]
    assert counts.tolist() == [1, 25, 5, 5, 0, want // 1000]
    replica._tower = None
    assert Replica.count(replica, sequences[1:2], 1, lambda *_: 0).tolist()[-1] == 0  # type: ignore[arg-type]
