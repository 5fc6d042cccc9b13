"""What training goes on from: under any layout, and on the same one bit for bit."""

import errno
import gc
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.checkpoint import distributed
from hybridrl.checkpoint.folder import cause_of
from hybridrl.checkpoint.parts import BackgroundWriter
from hybridrl.config import (
    LRSchedule,
    ModelConfig,
    OptimConfig,
    OptimName,
    PipelineSchedule,
    TrainerConfig,
    TrainLayoutConfig,
)
from hybridrl.config.loss import Loss
from hybridrl.engines.train import state_memory
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence

pytestmark = pytest.mark.long

OPTIM = OptimConfig(lr=1e-2, schedule=LRSchedule.linear, weight_decay=0.1)
FSDP = TrainLayoutConfig(fsdp=2)
TP = TrainLayoutConfig(fsdp=1, tp=2)
WHOLE = TrainLayoutConfig(fsdp=1)
PIPELINE = TrainLayoutConfig(pp=2, fsdp=2, tp=2)
ZIGZAG = TrainLayoutConfig(pp=2, fsdp=1, schedule=PipelineSchedule.zero_bubble)
EXPERTS = TrainLayoutConfig(fsdp=2, tp=2, ep=4)
FEWER = TrainLayoutConfig(pp=2, fsdp=2, ep=2)
REPLICAS = TrainLayoutConfig(replicas=2, fsdp=1, tp=2)


class Reversed(TrainLayoutConfig):
    """The layout of an engine whose first stage is on the last rank."""


FORWARD = TrainLayoutConfig(pp=2, fsdp=1)
BACKWARD = Reversed(pp=2, fsdp=1)
BACK_AND_FORTH = Reversed(pp=2, fsdp=1, schedule=PipelineSchedule.zero_bubble)
BACK_IN_TURNS = Reversed(pp=2, fsdp=1, schedule=PipelineSchedule.interleaved)
FAR_BACK = Reversed(pp=4, fsdp=1)
BACK_SHARDED = Reversed(pp=2, fsdp=2)
BACK_SPLIT = Reversed(pp=2, fsdp=1, tp=2)
BACK_TWICE = Reversed(pp=2, replicas=2, fsdp=1)


class AdvantageLoss(Loss):
    fields = ("advantages",)

    def __call__(self, log_probs, entropy, fields):
        return -log_probs * fields["advantages"], {}


@pytest.fixture
def make_source(tmp_path):
    """Four layers; a vocabulary of 41, which two ranks pad to 42."""

    def write(tied, **experts):
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            "qwen3_moe" if experts else "qwen3",
            vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied,
            initializer_range=0.3, **experts,
        )  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
        return tmp_path / "source"

    return write


def make(source, layout, name):
    trainer = TrainerConfig(optim=replace(OPTIM, name=name), layout=layout, steps=10)
    return TrainEngine(
        str(source),
        model=ModelConfig(),
        trainer=trainer,
        device=torch.device("cpu"),
        reverse=isinstance(layout, Reversed),
    )


def update(engine, number):
    """One step on eight sequences, dealt over the ranks."""
    random = torch.Generator().manual_seed(number)
    sequences = [
        TrainSequence(
            torch.randint(0, 41, (9,), generator=random), 4,
            {"advantages": float(torch.randn(1, generator=random))},
        )
        for _ in range(8)
    ]  # fmt: skip
    return engine.update(sequences[dist.get_rank() :: dist.get_world_size()], AdvantageLoss())


def whole(engine):
    """Every tensor that is saved, whole, by name; on all ranks."""
    mine = {
        name: tensor.full_tensor().clone() if hasattr(tensor, "full_tensor") else tensor
        for name, (tensor, *_) in distributed._tensors(engine)
    }
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return {name: tensor[:41] for tensors in gathered for name, tensor in tensors.items()}


def begin(source, layout, folder, name):
    """Two steps, saved; then what was saved, and a third step's metrics and result."""
    engine = make(source, layout, name)
    update(engine, 0)
    update(engine, 1)
    distributed.save(folder, engine, {})
    saved, progress = whole(engine), distributed.progress_of(engine)
    return saved, progress, update(engine, 2), whole(engine)


def go_on(source, layout, folder, progress, name):
    engine = make(source, layout, name)
    distributed.load(folder, engine, progress, {})
    return whole(engine), distributed.progress_of(engine), update(engine, 2), whole(engine)


def size(layout) -> int:
    return layout.pp * layout.replicas * layout.fsdp * layout.tp


def check(ranks, source, folder: Path, first, *layouts, name=OptimName.adamw) -> None:
    saved, progress, metrics, after = ranks(size(first), begin, source, first, folder, name)[0]
    assert progress == distributed.Progress(2, 2)
    parameters = {x.removeprefix("model/") for x in saved if x.startswith("model/")}
    matrices = {x for x in parameters if "_proj." in x} if name is OptimName.muon else set()
    assert len(parameters) > 40
    assert saved.keys() == {
        *(f"model/{x}" for x in parameters),
        *(f"momentum_buffer/{x}" for x in matrices),
        *(f"{moment}/{x}" for x in parameters - matrices for moment in ("exp_avg", "exp_avg_sq")),
    }
    for then in layouts:
        results = ranks(size(then), go_on, source, then, folder, progress, name)
        for loaded, again, others_metrics, others_after in results:
            assert again == progress
            assert loaded.keys() == saved.keys()
            assert all(torch.equal(loaded[name], saved[name]) for name in saved)
            if first == then:
                assert others_metrics == metrics
                assert all(torch.equal(others_after[name], after[name]) for name in after)
            for key in ("loss", "grad_norm", "lr"):
                assert others_metrics[key] == pytest.approx(metrics[key], abs=1e-6, rel=1e-6)


def test_it_goes_on_as_if_it_had_not_ended(ranks, make_source, tmp_path) -> None:
    check(ranks, make_source(tied=True), tmp_path / "saved", FSDP, FSDP, TP)


@pytest.mark.layouts
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (BACKWARD, (BACKWARD, TP)),
        (FSDP, (BACKWARD,)),
        (FORWARD, (BACKWARD, BACK_IN_TURNS)),
        (BACK_AND_FORTH, (BACK_AND_FORTH, FORWARD)),
        (FAR_BACK, (FAR_BACK, BACK_AND_FORTH)),
        (BACK_SHARDED, (BACK_SHARDED, BACK_SPLIT, REPLICAS)),
        (BACK_TWICE, (BACK_SHARDED, FSDP)),
    ],
)
def test_so_does_a_reversed_pipeline(ranks, make_source, tmp_path, first, then) -> None:
    check(ranks, make_source(tied=True), tmp_path / "saved", first, *then)


@pytest.mark.layouts
def test_so_does_muon(ranks, make_source, tmp_path) -> None:
    source = make_source(tied=True)
    check(ranks, source, tmp_path / "saved", FSDP, FSDP, TP, name=OptimName.muon)


@pytest.mark.layouts
def test_a_padded_vocabulary_by_any_name(ranks, tmp_path) -> None:
    """GPT-NeoX's are `embed_in` and `embed_out`: 42 rows with tp 2, and 41 without."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gpt_neox", vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
        num_attention_heads=2, initializer_range=0.3,
        rope_parameters={"rope_theta": 1e4, "rope_type": "default"},
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    check(ranks, tmp_path / "source", tmp_path / "saved", TP, WHOLE)


@pytest.mark.layouts
def test_experts_go_on_on_other_ranks(ranks, make_source, tmp_path) -> None:
    source = make_source(True, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    check(ranks, source, tmp_path / "saved", EXPERTS, FEWER, WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("first", "then"),
    [(TP, WHOLE), (WHOLE, PIPELINE), (PIPELINE, PIPELINE), (PIPELINE, ZIGZAG), (ZIGZAG, ZIGZAG),
     (ZIGZAG, REPLICAS), (REPLICAS, FSDP)],
)  # fmt: skip
def test_any_layout_goes_on_from_any_other(ranks, make_source, tmp_path, tied, first, then) -> None:
    check(ranks, make_source(tied), tmp_path / "saved", first, then)


def snapshots(source, folder):
    """Two in the background, written once training has gone on; their state, and what is loaded."""
    engine = make(source, FSDP, OptimName.adamw)
    update(engine, 0)
    writer, copies, saved = BackgroundWriter(engine.device), distributed.HostCopies(), []
    for number in (1, 2):
        update(engine, number)
        saved.append((whole(engine), distributed.progress_of(engine)))
        snapshot = distributed.StateCopy(folder / str(number), engine, {}, copies)
        addresses = {name: tensor.data_ptr() for name, tensor in copies.tensors.items()}
        update(engine, number + 5)
        writer.begin(snapshot)
        assert writer.finish() == []
    again = make(source, FSDP, OptimName.adamw)
    loaded = []
    for number, (_, progress) in enumerate(saved, 1):
        distributed.load(folder / str(number), again, progress, {})
        loaded.append(whole(again))
    kept = {name: tensor.data_ptr() for name, tensor in copies.tensors.items()} == addresses
    return [state for state, _ in saved], loaded, kept


def test_a_snapshot_is_of_its_moment(ranks, make_source, tmp_path) -> None:
    """What is written later, in the background, knows nothing of what training does meanwhile."""
    folder = tmp_path / "saved"
    for saved, loaded, kept in ranks(2, snapshots, make_source(tied=True), folder):
        assert kept, "a second snapshot takes no new memory"
        for one, other in zip(saved, loaded, strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        assert any(not torch.equal(tensor, saved[1][name]) for name, tensor in saved[0].items())


def names_of_later_copies(source, folder):
    """What is in the metadata of copies of weights, of moments too, of more tensors, of less."""
    engine, copies, names = make(source, FSDP, OptimName.adamw), distributed.HostCopies(), []
    more = distributed.named_average({"w": torch.arange(3.0)}, "actor")
    for number, kept in enumerate([{}, {}, more, {}]):
        if number == 1:
            update(engine, 0)
        copy = distributed.StateCopy(folder / str(number), engine, kept, copies)
        copy.write()
        copy.finish()
        read = FileSystemReader(folder / str(number)).read_metadata().state_dict_metadata
        names.append({name.partition("/")[0] for name in read})
    return names


def test_another_plan_is_made_where_other_tensors_are_copied(ranks, make_source, tmp_path) -> None:
    trained = {"model", "exp_avg", "exp_avg_sq"}
    wanted = [{"model"}, trained, {*trained, "actor"}, trained]
    for names in ranks(2, names_of_later_copies, make_source(tied=True), tmp_path / "saved"):
        assert names == wanted


def holders_after_leaving(source, folder):
    """Tensors that still have the device's memory of weights and moments, which have left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_memory, "leaves_device", lambda device: True)
        engine = make(source, WHOLE, OptimName.adamw)
    update(engine, 0)
    snapshot = distributed.StateCopy(folder, engine, {}, distributed.HostCopies())
    left = {block.memory.untyped_storage().data_ptr() for block in engine.memory._all()}
    engine.memory.leave()
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    shards = [distributed._local(one) for one in tensors]
    holders = [one.shape for one in shards if one.untyped_storage().data_ptr() in left]
    snapshot.write()
    snapshot.finish()
    return len(left), holders


def test_a_snapshot_lets_weights_leave_the_device(ranks, make_source, tmp_path) -> None:
    assert ranks(1, holders_after_leaving, make_source(tied=True), tmp_path / "saved") == [(2, [])]


def save_with_little_room(source, folder, background):
    """Files of rank 1 have at most 4000 bytes: the write fails in the kernel, as on a full disk."""
    engine = make(source, FSDP, OptimName.adamw)
    update(engine, 0)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
    try:
        if background:
            writer = BackgroundWriter(engine.device)
            writer.begin(distributed.StateCopy(folder, engine, {}, distributed.HostCopies()))
            writer.finish()
        else:
            distributed.save(folder, engine, {})
    except OSError as error:
        return error.errno, error.strerror, error.filename, str(error.__cause__)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk_is_named_on_all_ranks_and_not_by_torchs_writer(
    ranks, make_source, tmp_path, background
):
    folder = tmp_path / "resume"
    wanted = "the checkpoint could not be written: File too large"
    for error in ranks(2, save_with_little_room, make_source(True), folder, background):
        assert error == (errno.EFBIG, wanted, str(folder), "None")


def test_the_cause_of_a_librarys_error_is_found():
    full = OSError(errno.ENOSPC, "No space left on device")
    later = RuntimeError("[enforce fail] . unexpected pos 704 vs 598")
    later.__context__ = full
    assert cause_of(later) == (errno.ENOSPC, "No space left on device")
    told = "Error while serializing: I/O error: No space left on device (os error 28)"
    assert cause_of(SafetensorError(told)) == (errno.ENOSPC, "No space left on device")
    assert cause_of(RuntimeError("a\n  b")) == (errno.EIO, "a b")
