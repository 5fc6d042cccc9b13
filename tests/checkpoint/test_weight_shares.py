"""The invariants of `hybridrl.checkpoint.weight_shares`, on random models and layouts."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hybridrl.checkpoint.weight_shares import Conversion, weight_shares

STAGES = st.integers(1, 3)
SIZES = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=3), min_size=3, max_size=30)


@given(sizes=SIZES, stages=STAGES, per_stage=st.integers(1, 5), data=st.data())
def test_invariants(sizes, stages, per_stage, data):
    conversions = [
        Conversion(
            (f"model.{i}",), {f"hub.{i}.{j}": size for j, size in enumerate(results)}, i % stages
        )
        for i, results in enumerate(sizes)
    ]
    ranks = [[*range(stage * per_stage, (stage + 1) * per_stage)] for stage in range(stages)]
    most, least, turn = (data.draw(st.integers(1, 200)) for _ in range(3))
    shares = weight_shares(conversions, ranks, most=most, least=least, turn=turn)

    assert len({share.writer for share in shares}) == len(shares)
    files = [file for share in shares for file in share.files]
    written = Counter(name for file in files for name in file.tensors)
    sizes_of = {name: size for c in conversions for name, size in c.written.items()}
    assert written == Counter(sizes_of.keys()), "each tensor in one file"
    assert len({file.name for file in files}) == len(files)
    for file in files:
        assert file.size == sum(sizes_of[name] for name in file.tensors)
        assert file.size <= most or len(file.tensors) == 1
    by_name = {c.names[0]: c for c in conversions}
    assert Counter(n for share in shares for n in share.names) == Counter(by_name.keys())
    for share in shares:
        own = [by_name[name] for name in share.names]
        assert [n for c in own for n in c.written] == [n for f in share.files for n in f.tensors]
        for names in share.turns:
            assert sum(by_name[n].size for n in names) <= turn or len(names) == 1

    total = sum(c.size for c in conversions)
    if total <= most:
        assert [share.writer for share in shares] == [0]
        assert [file.name for file in files] == ["model.safetensors"]
        return
    for stage, members in enumerate(ranks):
        own = [c for c in conversions if c.stage == stage]
        of_stage = [share for share in shares if share.writer in members]
        assert {n for s in of_stage for n in s.names} == {n for c in own for n in c.names}
        whole = sum(c.size for c in own)
        number = min(per_stage, max(1, whole // least))
        assert len(of_stage) <= number
        largest = max(c.size for c in own)
        assert all(share.size <= whole / number + largest for share in of_stage)


def test_eight_billion_parameters_on_eight_and_on_sixty_four_ranks():
    """36 layers of seven matrices in bfloat16, with embedding and head: 16 GB."""
    layer = [33.6e6, 8.4e6, 8.4e6, 33.6e6, 100.7e6, 100.7e6, 100.7e6]
    sizes = [1.24e9, *(x for _ in range(36) for x in layer), 1.24e9]
    model = [Conversion((str(i),), {str(i): int(x)}, 0) for i, x in enumerate(sizes)]
    limits = {"most": 4 * 2**30, "least": 2**30, "turn": 2**24}
    eight = weight_shares(model, [[*range(8)]], **limits)
    assert sorted(share.writer for share in eight) == [*range(8)]
    assert max(share.size for share in eight) < 1.01 * sum(share.size for share in eight) / 8
    assert all(len(share.files) == 1 for share in eight)
    many = weight_shares(model, [[*range(64)]], **limits)
    assert sorted(share.writer for share in many) == [i * 64 // 15 for i in range(15)]
