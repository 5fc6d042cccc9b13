"""Wide instances: who is in them, and that each rank holds what it needs there."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from hybridrl.config import Grouping
from hybridrl.layout.grouping import TrainAxes, gen_positions
from hybridrl.layout.local import LocalTensor
from hybridrl.layout.mesh import gen_mesh
from hybridrl.layout.parameters import gen_layout
from hybridrl.layout.wide import wide_heads, wide_instances, wide_mesh, wide_slices
from hybridrl.models.attention_shape import attention_shape
from hybridrl.models.parallel import model_parameters

SIZES = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 4, "vocab_size": 32,
}  # fmt: skip
MODELS: Sequence[tuple[PretrainedConfig, int]] = (  # with expert parallelism, or without
    (Qwen3Config(**SIZES, tie_word_embeddings=True), 0),
    (LlamaConfig(**SIZES, attention_bias=True), 0),
    (Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=8), 1),
)


parameters_of = cache(lambda number: model_parameters(MODELS[number][0]))


def test_the_example() -> None:
    assert wide_instances(3, [2, 3]) == {3: (0, 1), 4: (0, 1, 2)}


@settings(max_examples=30)
@given(num=st.integers(1, 9), widths=st.sets(st.integers(2, 9)))
def test_members_are_consecutive_and_in_one_instance_of_a_width(num: int, widths: set[int]) -> None:
    table = wide_instances(num, sorted(widths))
    assert list(table) == list(range(num, num + len(table)))
    for width in widths:
        members = [m for group in table.values() if len(group) == width for m in group]
        assert members == list(range(num // width * width))
        assert all(len(group) in widths for group in table.values())


@pytest.mark.parametrize("number", range(3), ids=["qwen3", "llama", "qwen3_moe"])
@pytest.mark.parametrize("grouping", [Grouping.strided, Grouping.vanilla])
@pytest.mark.parametrize(
    ("pp", "tp", "width"), [(1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2), (1, 1, 4), (1, 1, 8)]
)
def test_a_rank_holds_its_wide_boxes(
    number: int, grouping: Grouping, pp: int, tp: int, width: int
) -> None:
    """The slices of its tensors are the boxes of the layout at tp k t. Weights received: none."""
    model, experts = MODELS[number]
    parameters, layers = parameters_of(number), model.num_hidden_layers
    ep, wide_ep = (tp, tp * width) if experts else (1, 1)
    axes = TrainAxes(replicas=2, fsdp=pp * tp * width)
    gen = gen_mesh(gen_positions(axes, pp, tp, grouping), pp, tp)
    narrow = gen_layout(parameters, gen, layers, ep=ep)
    for members in wide_instances(gen.extent("instance"), [width]).values():
        mesh = wide_mesh(gen, members)
        wide = gen_layout(parameters, mesh, layers, ep=wide_ep)
        for rank in mesh.ranks:
            own, place = gen.coordinates(rank), mesh.coordinates(rank)
            member = members.index(own["instance"])
            assert place == {"instance": 0, "pp": own["pp"], "tp": own["tp"] * width + member}
            for parameter in parameters:
                tensor = LocalTensor(narrow.local(parameter.name, rank))
                boxes = wide.local(parameter.name, rank)
                if tensor.shape is None:
                    assert not boxes
                    continue
                (box,) = boxes
                slices = wide_slices(parameter, tensor.shape, tp, width, member)
                assert slices == tensor.slices(box), parameter.name


@settings(max_examples=40)
@given(heads=st.sampled_from([1, 2, 4, 8, 16]), tp=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_heads_are_those_of_the_wide_layout(heads: int, tp: int, data: st.DataObject) -> None:
    """The keys and values of every wide rank, by their numbers in the model."""
    width = data.draw(st.sampled_from([2, 4, 8]))
    shape = attention_shape(LlamaConfig(num_attention_heads=64, num_key_value_heads=heads))

    def numbers(tp: int, rank: int) -> list[int]:
        num = shape.local_kv_heads(tp)
        return list(range(rank * heads // tp, rank * heads // tp + num))

    for rank in range(tp):
        own = numbers(tp, rank)
        for member in range(width):
            wide = numbers(tp * width, rank * width + member)
            assert own[wide_heads(len(own), len(wide), width, member)] == wide
