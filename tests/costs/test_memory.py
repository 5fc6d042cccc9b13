"""The memory plan's sums, by hand on small numbers."""

from dataclasses import replace

import pytest

from hybridrl.costs.generation_memory import NativeSizes, VLLMSizes
from hybridrl.costs.image_memory import ImageSizes
from hybridrl.costs.memory import (
    WAITING,
    KeptIdSizes,
    MemoryPlan,
    PoolSizes,
    RunPlan,
    ScoringSizes,
    plan_memory,
    reserved_bytes,
)
from hybridrl.costs.push_memory import ReceivedSizes
from hybridrl.costs.train_memory import EIGHT_BIT_MOMENT, ActivationSizes, TrainSizes
from hybridrl.costs.zero_bubble import ChunkSizes, ZeroBubbleUpdate

NOTHING = ActivationSizes(0, 0)
# Two layers of 100 elements and a root group of 1,000, over two FSDP ranks, in bfloat16.
SIZES = TrainSizes(
    trained=600,
    frozen=0,
    layer=100,
    layers=2,
    root=1000,
    trained_layer=100,
    trained_root=1000,
    reduced_layer=50,
    largest=500,
    read=900,
    itemsize=2,
    fsdp=2,
    tp=1,
    keep_unsharded=False,
    head=500,
    several_rows=False,
    earlier_gradients=False,
    layer_activations=ActivationSizes(kept=50_000, backward=70_000),
    ends=ActivationSizes(kept=1_000, backward=5_000),
    saved=5_000,
)
GENERATION = NativeSizes(
    weights=2400,
    token=10,
    gathered=5,
    prefill=700,
    logits=300,
    sampling=200,
    joined=200,
    buckets=64,
    longest=16,
    most=160,
    wanted=0,
)
VLLM = VLLMSizes(
    weights=2400,
    token=10,
    prefill=700,
    logits=300,
    joined=0,
    buckets=64,
    longest=16,
    most=160,
    wanted=0,
)
RUN = PoolSizes(
    trained={"actor": SIZES},
    scoring={"reference": ScoringSizes(weights=2400, activations=9_000)},
    generation=GENERATION,
    staying=(),
)


def test_training_when_the_forward_pass_ends() -> None:
    """One layer's activations are kept, the last one's backward pass is under way."""
    assert SIZES.update() == {
        "gathered weights": 2 * (1000 + 2 * 100),
        "activations": 50_000 + 70_000 + 2 * 500,
        "gradients": 0,
    }


def test_training_when_the_backward_pass_ends() -> None:
    """Without activations the root group's gradients and their copy are the most."""
    sizes = replace(SIZES, layer_activations=NOTHING, ends=NOTHING)
    reduced = 4 * 2 * 100 // 2
    copied = 2 * 1000 + 4 * 1000
    assert sizes.update() == {"gradients": reduced + copied}
    alone = replace(sizes, fsdp=1, reduced_layer=100)  # the copy, and the sum of one rank
    assert alone.update() == {"gradients": 4 * 2 * 100 + 4 * 1000 + 4 * 1000}


def test_gradients_of_earlier_rows_stay() -> None:
    sizes = replace(SIZES, several_rows=True, earlier_gradients=True)
    assert sizes.update()["gradients"] == 4 * 600
    unsharded = replace(sizes, keep_unsharded=True)
    assert unsharded.update()["gradients"] == 4 * 1200
    assert unsharded.update()["gathered weights"] == 2 * 1200


def test_gradients_of_earlier_calls_stay() -> None:
    """Early backward: sharded ones, beside those of a call that are whole until its last row."""
    early = replace(SIZES, early=True, earlier_gradients=True)
    assert early.update()["gradients"] == 4 * 600  # of a large model: as of earlier rows
    assert "early gradients" not in early.update()
    unsharded = replace(SIZES, early=True, keep_unsharded=True)
    assert unsharded.update()["early gradients"] == 4 * 600
    ends = replace(unsharded, layer_activations=NOTHING, ends=NOTHING)
    assert ends.update()["early gradients"] == 4 * 600
    plain = replace(SIZES, keep_unsharded=True)
    assert unsharded.update() == plain.update() | {"early gradients": 4 * 600}
    of_chunk = ChunkSizes(
        kept=9, between=9, first=9, second=9, gathered=9, gradients=9, sums=9, arriving=9,
        copied=9, reduced=9, received=0, received_gradient=9,
    )  # fmt: skip
    order = [("F", 0), ("I", 0), ("W", 0)]
    staged = replace(unsharded, zero_bubble=ZeroBubbleUpdate([of_chunk], order, 1))
    assert staged.update()["early gradients"] == 4 * 600


def test_the_gradient_of_an_embedding_is_whole_until_it_is_reduced() -> None:
    """On each of two tp ranks 800 elements, of which 400 are the rank's."""
    sizes = replace(
        SIZES, keep_unsharded=True, several_rows=True, layer_activations=NOTHING, ends=NOTHING
    )
    assert sizes.update()["gradients"] == 4 * 1200 + 2 * 1000
    embedding = replace(sizes, tp=2, embedding=800, largest=800)
    assert embedding.update()["gradients"] == 4 * 1600 + 2 * 1400
    summed = replace(embedding, earlier_gradients=True, ends=ActivationSizes(0, 10**5))
    assert summed.update()["gradients"] == 4 * 1600


def test_offloaded_activations_are_those_of_two_layers() -> None:
    """The bytes do not grow with the number of layers, or of rows in flight."""
    kept = replace(SIZES, layers=8, in_flight=3)
    layer, number = kept.layer_activations, kept.layers * kept.in_flight
    last = kept.itemsize * kept.head + layer.backward
    assert kept.update()["activations"] == (number - 1) * layer.kept + last
    offloads = replace(kept, offloads=True)
    assert offloads.update()["activations"] == layer.kept + last
    alone = replace(offloads, layers=1)
    assert alone.update()["activations"] == last


def test_muon_has_one_moment_and_whole_matrices_in_its_step() -> None:
    sizes = replace(SIZES, layer_activations=NOTHING, ends=NOTHING)
    muon = replace(sizes, matrices=500, owned_matrices=550, largest_matrix=1000)
    assert muon.state["moments"] == 8 * 100 + 4 * 500
    whole = 2 * (500 + 550 + 4 * 1000)
    assert muon.update() == {"gradients": 4 * 600, "whole matrices": whole}


def test_moments_of_eight_bits_have_a_scale_for_each_block() -> None:
    assert replace(SIZES, moment=EIGHT_BIT_MOMENT).state["moments"] == round(2 * 600 * (1 + 1 / 64))


def test_adapters_leave_the_weights_in_the_compute_format() -> None:
    sizes = replace(
        SIZES, trained=6, frozen=594, trained_layer=10, trained_root=0, reduced_layer=5, head=0
    )
    assert sizes.state == {
        "float32 weights": 4 * 6,
        "frozen weights": 2 * 594,
        "moments": 8 * 6,
    }


def test_gpus_offload_what_a_phase_does_not_need() -> None:
    plan = plan_memory(RUN, "cuda", capacity=400_000, reserved=1_000)
    sizes = {phase.name: dict(phase.sizes) for phase in plan.phases}
    assert sizes["load actor"] == {"shards": 4 * 600}
    assert sizes["switch"] == {
        "float32 weights": 2400,
        "moments": 4800,
        "generation weights": 2400,
        "buckets": 200,
    }
    cache = {"generation weights": 2400, "KV cache": 1600, "copied keys and values": 800}
    assert sizes["load rollout engine"] == cache
    assert sizes["prefill"] == {**cache, "activations": 700}
    assert sizes["decode"] == {**cache, "logits": 200}
    assert sizes["score reference"] == {
        "generation weights": 2400,
        "scoring weights": 2400,
        "activations": 9_000,
    }
    state = {"float32 weights": 2400, "moments": 4800}
    assert sizes["save actor"] == {**state, "parameter being saved": 5000}
    assert plan.cache_tokens == 160
    assert plan.peak.name == "train actor"
    assert plan.fits
    assert not plan.impossible


def test_the_cache_takes_what_is_left_and_one_sample_at_least() -> None:
    room = 2400 + 64 + 300 + 700 + 1_000  # weights, buckets, logits, prefill, others
    assert plan_memory(RUN, "cuda", room + 100 * 15, 1_000).cache_tokens == 100
    assert plan_memory(RUN, "cuda", room, 1_000).cache_tokens == 16
    wanted = replace(RUN, generation=replace(GENERATION, wanted=40))
    assert plan_memory(wanted, "cuda", room, 1_000).cache_tokens == 40


def test_cpus_keep_everything() -> None:
    plan = plan_memory(RUN, "cpu", capacity=10**9, reserved=0)
    sizes = {phase.name: phase.sizes for phase in plan.phases}
    assert sizes["load actor"] == {"float32 weights": 2400, "weights file": 1800}
    stays = {"float32 weights": 2400, "moments": 4800, "scoring weights": 2400}
    for name in ("switch", "prefill", "decode", "score reference", "train actor"):
        assert stays.items() <= sizes[name].items(), name
    assert plan.cache_tokens == 160


@pytest.mark.parametrize(
    ("copied", "name", "size"), [(0, "copied keys and values", 800), (30, "logits", 200)]
)
def test_on_a_cpu_a_decode_step_copies_keys_then_samples(copied: int, name: str, size: int) -> None:
    """One after the other: the larger of both counts."""
    run = replace(RUN, generation=replace(GENERATION, copied=copied))
    plan = plan_memory(run, "cpu", capacity=10**9, reserved=0)
    (decode,) = (p for p in plan.phases if p.name == "decode")
    assert {n: decode.sizes.get(n) for n in ("logits", "copied keys and values")} == {
        "logits": None, "copied keys and values": None, name: size
    }  # fmt: skip


def _plan(run: PoolSizes, room: int = 400_000) -> MemoryPlan:
    return plan_memory(run, "cuda", capacity=room, reserved=1_000)


def test_vllm_takes_what_is_left() -> None:
    """All but the buckets, for weights, cache and arrays; one sample's cache at the least."""
    run = replace(RUN, generation=VLLM)
    plan = _plan(run)
    sizes = {phase.name: phase.sizes for phase in plan.phases}
    rest = 400_000 - 1_000 - 64 - 2400
    share = {"generation weights": 2400, "KV cache and arrays of vLLM": rest}
    assert sizes["load rollout engine"] == sizes["generate"] == share
    assert "decode" not in sizes
    assert sizes["switch"]["buckets"] == 64
    assert plan.cache_tokens == (rest - 700) // 10  # less the activations of a prefill
    (tight,) = (p for p in _plan(run, 3_000).phases if p.name == "generate")
    assert tight.sizes == {"generation weights": 2400, "KV cache and arrays of vLLM": 160}


def test_vllm_has_the_cache_that_is_asked_for() -> None:
    """On CPUs, which vLLM does not fill, the cache holds all samples."""
    wanted = replace(RUN, generation=replace(VLLM, wanted=40))
    (generate,) = (p for p in _plan(wanted).phases if p.name == "generate")
    assert generate.sizes == {"generation weights": 2400, "KV cache": 400, "activations": 700}
    on_cpus = plan_memory(replace(RUN, generation=VLLM), "cpu", capacity=10**9, reserved=0)
    assert on_cpus.cache_tokens == 160


def test_a_pool_without_the_actor_does_not_generate() -> None:
    plan = _plan(replace(RUN, trained={"critic": SIZES}, generation=None))
    names = ["load critic", "score reference", "train critic", "save critic"]
    assert [p.name for p in plan.phases] == names
    assert plan.cache_tokens is None


def test_a_run_of_two_pools_fits_where_both_do() -> None:
    critics = replace(RUN, trained={"critic": SIZES}, generation=None)
    plans = {"actor": _plan(RUN), "critic": _plan(critics)}
    both = RunPlan(plans, "torch", "by model.attention=torch")
    assert both.fits
    assert both.verdict().startswith("in pool actor it fits: ")
    assert "; in pool critic it fits: " in both.verdict()
    assert [row[0] for row in both.rows() if row[0].startswith("pool")] == [
        "pool actor",
        "pool critic",
    ]
    record = both.record()
    assert record["fits"] is True
    assert record["pools"] == {name: plan.record() for name, plan in plans.items()}
    tight = replace(both, pools=plans | {"critic": _plan(critics, 10_000)})
    assert tight.impossible
    assert tight.verdict().startswith("in pool critic it does not fit: ")


def test_what_does_not_fit() -> None:
    plan = plan_memory(RUN, "cuda", capacity=100_000, reserved=1_000)
    assert plan.impossible
    assert not plan.fits
    needs = (
        "does not fit: a rank has 0.1 MiB of 0.1 MiB for it, and the largest phase, train actor, "
        "needs 0.1 MiB"
    )
    assert plan.verdict() == needs
    assert replace(plan, advice="more cluster.ranks").verdict() == (
        f"{needs}; less with more cluster.ranks"
    )
    tight = plan_memory(RUN, "cuda", plan.peak.total, 1_000)
    assert not tight.fits
    assert not tight.impossible


def test_a_model_that_begins_as_the_actor_takes_its_parameters_one_by_one() -> None:
    assert SIZES.loading() == {"shards": 4 * 600}
    copied = {"shards": 4 * 600, "whole parameters": 4 * 500}
    assert SIZES.loading(from_actor=True) == copied


def test_waiting_conversations_are_on_the_host() -> None:
    """The cache of 160 tokens holds ten of 50 full conversations of 16; as many go to the host."""
    many = replace(GENERATION, conversations=50 * 16)
    few = replace(many, conversations=12 * 16)
    limited = replace(many, host_tokens=100)
    for sizes, tokens in ((GENERATION, 0), (many, 160), (few, 32), (limited, 100)):
        run = replace(RUN, generation=sizes)
        plain = plan_memory(replace(RUN, generation=GENERATION), "cpu", 10**9, 0)
        plan = plan_memory(run, "cpu", 10**9, 0)
        grown = {
            phase.name: phase.total - before.total
            for phase, before in zip(plan.phases, plain.phases, strict=True)
        }
        assert {name for name, size in grown.items() if size} <= {"prefill", "decode"}
        assert grown["decode"] == grown["prefill"] == 10 * tokens
        on_gpu = plan_memory(run, "cuda", 10**9, 0)
        assert on_gpu.on_host.get(WAITING, 0) == 10 * tokens
        ((_, _, owners),) = [row for row in on_gpu.rows() if row[0] == "on the host"]
        assert (WAITING in owners) == (tokens > 0)


def test_a_gpu_with_a_small_cache_moves_what_it_cannot_hold() -> None:
    """The cache has what is left: the fewer tokens it holds, the more of them give way."""
    sizes = replace(GENERATION, conversations=4 * 16, wanted=48)
    plan = plan_memory(replace(RUN, generation=sizes), "cuda", 10**9, 0)
    assert plan.on_host[WAITING] == 10 * (64 - 48)


def test_weights_and_moments_wait_on_the_host_of_a_gpu() -> None:
    """All roles do while a rank generates; on CPUs they are in the phases."""
    two = replace(RUN, trained={"actor": SIZES, "critic": SIZES})
    plan = plan_memory(two, "cuda", 10**9, 0)
    state = {owner: 2 * size for owner, size in SIZES.state.items() if size}
    scoring = sum(scorer.weights for scorer in RUN.scoring.values())
    assert plan.on_host == state | {"scoring weights": scoring}
    assert not plan_memory(two, "cpu", 10**9, 0).on_host


# 2,400 and 64 bytes for generation weights and buckets, 1,000 for others: what the cache has left.
AROUND = 2400 + 64 + 1_000
STATE = 12 * 600
FULL = 160 * 15 + 300 + 700
"""A cache of all samples, with what a decode step keeps free of it."""
ROOMY = replace(RUN, staying=None)
SMALL_ROLES = replace(
    ROOMY,
    trained={"actor": replace(SIZES, layer_activations=NOTHING, ends=NOTHING)},
    scoring={},
)


def test_what_fits_stays_and_the_cache_gives_way_first() -> None:
    """To half of the tokens that it would have alone: those of 160 samples, or fewer."""
    saved = 5_000 - 1_000  # a parameter that is gathered where logits and prefill are else
    taken = AROUND + STATE + saved
    plan = _plan(SMALL_ROLES, taken + FULL)
    assert plan.staying == {"actor": STATE}
    assert plan.cache_tokens == 160
    assert sum(plan.on_host.values()) == 0
    less = _plan(SMALL_ROLES, taken + 80 * 15 + 1_000)
    assert less.staying == {"actor": STATE}
    assert less.cache_tokens == 80
    none = _plan(SMALL_ROLES, taken + 80 * 15 + 999)
    assert none.staying == {}
    assert none.cache_tokens == 160
    assert sum(none.on_host.values()) == STATE


def test_what_stays_is_in_every_phase() -> None:
    plan = _plan(ROOMY)
    sizes = {phase.name: phase.sizes for phase in plan.phases}
    state = {"float32 weights": 2400, "moments": 4800}
    for name in ("switch", "prefill", "decode", "score reference", "train actor", "save actor"):
        assert state.items() <= sizes[name].items(), name
    assert sizes["load rollout engine"]["float32 weights"] == 2400
    assert "moments" not in sizes["load rollout engine"]  # until the first update
    assert plan.on_host == {"scoring weights": 2400}
    assert (
        "stays",
        "0.0 MiB",
        "weights and moments of actor are on the device in every phase",
    ) in (plan.rows())


def test_a_role_stays_only_if_all_phases_have_room() -> None:
    """What stays of one needs room while the other trains, which takes most."""
    both = replace(ROOMY, trained={"actor": SIZES, "critic": SIZES})
    peak = max(p.total for p in _plan(replace(both, staying=())).phases)
    assert _plan(both, peak + 1_000 + STATE).staying == {"actor": STATE, "critic": STATE}
    assert _plan(both, peak + 1_000 + STATE - 1).staying == {}
    # The other one's training is smaller, by its activations.
    less = replace(both, trained={"actor": SIZES, "critic": SMALL_ROLES.trained["actor"]})
    assert _plan(less, peak + 1_000 + STATE - 1).staying == {"actor": STATE}
    # A phase that does not fit in any case, and is no larger, decides nothing.
    assert _plan(ROOMY, peak - 1_000).staying == {"actor": STATE}
    together = replace(both, together=[("actor", "critic")])
    sizes = {p.name: p.sizes for p in _plan(together).phases}
    assert sizes["train together"]["moments"] == 2 * 4800  # each once
    # Scoring has no KV cache, but what stays.
    large = replace(both, scoring={"reference": ScoringSizes(weights=peak, activations=0)})
    room = peak + 2400 + 1_000
    assert _plan(large, room).staying == {}
    assert _plan(large, room + STATE).staying == {"actor": STATE}


def test_a_cache_that_is_asked_for_keeps_its_size() -> None:
    wanted = replace(SMALL_ROLES, generation=replace(GENERATION, wanted=100))
    taken = AROUND + STATE + 4_000 + 1_000
    assert _plan(wanted, taken + 100 * 15).staying == {"actor": STATE}
    assert _plan(wanted, taken + 100 * 15 - 1).staying == {}


def test_vllm_s_cache_gives_way_likewise() -> None:
    """Its share is smaller; with nothing free besides, a saved parameter counts in full."""
    run = replace(SMALL_ROLES, generation=VLLM)
    plan = _plan(run, 400_000)
    assert plan.staying == {"actor": STATE}
    assert plan.cache_tokens == (400_000 - AROUND - STATE - 5_000 - 700) // 10
    tight = AROUND + 700 + 2 * (STATE + 5_000)
    assert _plan(run, tight).staying == {"actor": STATE}
    assert _plan(run, tight - 20).staying == {}


def test_cpus_offload_nothing() -> None:
    assert plan_memory(ROOMY, "cpu", capacity=10**9, reserved=0).staying == {}


def test_roles_of_a_pool_without_the_actor_stay_likewise() -> None:
    critics = replace(ROOMY, trained={"critic": SIZES}, generation=None)
    plan = _plan(critics)
    assert plan.staying == {"critic": STATE}
    assert {"moments": 4800}.items() <= {p.name: p.sizes for p in plan.phases}[
        "score reference"
    ].items()


IMAGES = ImageSizes(tower=5_000, kept=900, computing=10_000, prefill=80, scored=70, trained=60)
WITH_IMAGES = replace(RUN, images=IMAGES)
CAPACITY = 10**6


def more(run: MemoryPlan, plain: MemoryPlan) -> dict[str, int]:
    """Bytes by which the phases of a run are larger."""
    pairs = zip(run.phases, plain.phases, strict=True)
    return {phase.name: phase.total - other.total for phase, other in pairs}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tower_stays_and_no_phase_computes_while_it_does(device: str) -> None:
    """An image of 10,000 bytes is read before a prefill of 700, and before an update of more."""
    plain, images = (plan_memory(run, device, CAPACITY, 0) for run in (RUN, WITH_IMAGES))
    update = sum(SIZES.update().values())
    assert update > 10_000 > 9_000
    assert more(images, plain) == {
        "load actor": 0,
        "load rollout engine": 0 if device == "cuda" else 5_900,
        "switch": 5_900,
        "prefill": 5_900 + 80 + 10_000 - 700,
        "decode": 5_900,
        "score reference": 5_900 + 70 + 10_000 - 9_000,
        "train actor": 5_900 + 60,
        "save actor": 5_900,
    }


def test_a_cache_leaves_room_for_images() -> None:
    """On a GPU that it would fill: as many bytes less, in whole tokens."""
    reserved = 5_900 + 80 + 10_000 - 700
    assert reserved_bytes(WITH_IMAGES, ()) == reserved
    run = replace(RUN, generation=replace(RUN.generation, most=10**9))
    plain, images = (
        plan_memory(own, "cuda", CAPACITY, 0) for own in (run, replace(run, images=IMAGES))
    )
    assert plain.cache_tokens is not None
    assert images.cache_tokens is not None
    assert plain.cache_tokens - images.cache_tokens == pytest.approx(reserved / (10 + 5), abs=1)
    prefill = next(phase for phase in images.phases if phase.name == "prefill")
    assert prefill.total <= CAPACITY


def test_a_cache_leaves_room_for_features_in_the_engine() -> None:
    """They count once, with the weights that they are beside."""
    own = replace(WITH_IMAGES, images=replace(IMAGES, engine=500))
    assert reserved_bytes(own, ()) == reserved_bytes(WITH_IMAGES, ()) + 500
    sizes = {phase.name: phase.sizes for phase in plan_memory(own, "cuda", CAPACITY, 0).phases}
    assert sizes["prefill"]["features in the engine"] == 500
    assert sizes["decode"]["features in the engine"] == 500
    assert "features in the engine" not in sizes["train actor"]
    run = replace(RUN, generation=replace(RUN.generation, most=10**9))
    counts = [
        plan_memory(replace(run, images=images), "cuda", CAPACITY, 0).cache_tokens or 0
        for images in (IMAGES, own.images)
    ]
    assert counts[0] - counts[1] == pytest.approx(500 / (10 + 5), abs=1)


def test_a_pool_that_generates_alone_has_a_tower() -> None:
    received = ReceivedSizes(arrays=0)
    run = replace(WITH_IMAGES, trained={}, scoring={}, received=received)
    sizes = {p.name: p.sizes for p in plan_memory(run, "cuda", CAPACITY, 0).phases}
    assert sizes["load weights"]["image tower"] == sizes["prefill"]["image tower"] == 5_000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kept_ids_are_on_the_host_and_in_rows(device: str) -> None:
    scoring = {"reference": replace(RUN.scoring["reference"], kept_ids=30)}
    run = replace(RUN, kept_ids=KeptIdSizes(samples=400, trained=50), scoring=scoring)
    plain, kept = (plan_memory(own, device, CAPACITY, 0) for own in (RUN, run))
    on_host = 400 if device == "cpu" else 0
    sizes = more(kept, plain)
    assert sizes["decode"] == on_host
    assert sizes["score reference"] == on_host + 30
    assert sizes["train actor"] == on_host + 50
    assert kept.on_host.get("kept ids of samples", 0) == 400 - on_host
