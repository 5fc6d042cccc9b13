"""Ranks of a node that hold the same frozen weights share one copy of them in its memory."""

import logging
import mmap
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hybridrl.config import ConfigError
from hybridrl.engines.score import node_copy
from hybridrl.engines.score.engine import ScoreEngine, Weights
from hybridrl.engines.score.shared_memory import MemoryAddress, SharedMemory, node_key
from hybridrl.layout.mesh import gen_mesh
from hybridrl.models.shard import GenParallel

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path):
    """A model of 2 MB, many pages."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=53,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    return str(tmp_path)


def make(path, tp=1):
    """An engine without weights, on an instance of `tp` ranks."""
    size = dist.get_world_size()
    positions = [(rank // tp, 0, rank % tp) for rank in range(size)]
    parallel = GenParallel.make(gen_mesh(positions, 1, tp), "cpu") if tp > 1 else GenParallel()
    config = AutoConfig.from_pretrained(path)
    return ScoreEngine(config, parallel, dtype=torch.float32, device=CPU)


def shared_maps():
    """Inode and kB by kind of the shared memory that this process maps."""
    maps, current = [], None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            current = None
            if "memfd:hybridrl" in line:
                current = {"inode": int(line.split()[4])}
                maps.append(current)
        elif current is not None and line.endswith("kB"):
            kind, size, _ = line.split()
            current[kind.rstrip(":")] = int(size)
    return maps


def load_and_write(path, tp, sequences):
    """Maps and scores of a loaded engine; the scores after one rank has changed a weight."""
    alone, engine = make(path, tp), make(path, tp)
    alone.load(path)
    wanted = alone.log_probs(sequences)
    loads = []
    with patch.object(ScoreEngine, "load", counted(ScoreEngine.load, loads)):
        engine.load_once(path)
    scores = engine.log_probs(sequences)
    pairs = zip(engine.model.parameters(), alone.model.parameters(), strict=True)
    equal = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    dist.barrier()  # all have read their weights
    before = shared_maps()
    dist.barrier()
    weights = engine.parameters()
    if dist.get_rank() == 0:
        for tensor in weights.values():
            tensor.zero_()
    dist.barrier()
    changed = engine.log_probs(sequences)
    return {
        "loads": len(loads),
        "equal": equal and all(map(torch.equal, scores, wanted)),
        "maps": before,
        "same after": all(map(torch.equal, changed, wanted)),
        "size": sum(p.nbytes for p in engine.model.parameters()),
        "maps after": shared_maps(),
    }


def counted(function, calls):
    def call(*args, **more):
        calls.append(args)
        return function(*args, **more)

    return call


def check(results, shards):
    """`shards` has a number for each rank, equal for those with the same shards."""
    inodes = {}
    for rank, (own, shard) in enumerate(zip(results, shards, strict=True)):
        assert own["loads"] == (shards.index(shard) == rank), "one rank reads each shard"
        assert own["equal"]
        (memory,) = own["maps"]
        assert inodes.setdefault(shard, memory["inode"]) == memory["inode"], "the same pages"
        assert memory["Size"] * 1024 >= own["size"]
        assert memory["Rss"] * 1024 >= own["size"] // 2, "they have been read"
        assert memory["Pss"] < 0.75 * memory["Rss"], "by several processes"
        assert not memory["Anonymous"], "and written by none"
        assert own["same after"] == (rank > 0), "what a rank writes stays its own"
    assert len(set(inodes.values())) == len(set(shards))
    assert results[0]["maps after"][0]["Anonymous"] * 1024 >= results[0]["size"] // 2


def test_two_ranks_map_the_same_pages(ranks, model, sequences):
    check(ranks(2, load_and_write, model, 1, sequences), [0, 0])


@pytest.mark.layouts
def test_ranks_share_with_those_that_hold_the_same_shards(ranks, model, sequences):
    """Two instances of two ranks. Rank 0's zeros change the scores of its own instance alone."""
    results = ranks(4, load_and_write, model, 2, sequences)
    assert not results[1]["same after"]
    results[1]["same after"] = True
    check(results, [0, 1, 0, 1])


def load_badly(path, fault, sequences):
    """What loading logs and raises, and how many ranks read the weights, under a fault."""
    lines, loads = [], []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("hybridrl.engines.score.node_copy").addHandler(handler)
    patches = {
        "no memory": patch.object(SharedMemory, "create", side_effect=OSError("no memory left")),
        "unseen": patch.object(SharedMemory, "open", side_effect=OSError("it is not seen")),
        "other node": patch.object(node_copy, "node_key", lambda: ("a node", dist.get_rank())),
        "no weights": patch.object(node_copy, "node_key", node_key),
    }
    engine, error = make(path), ""
    with patches[fault], patch.object(ScoreEngine, "load", counted(ScoreEngine.load, loads)):
        try:
            engine.load_once(str(path) + ("/none" if fault == "no weights" else ""))
        except ConfigError as caught:
            error = str(caught)
    maps = shared_maps()
    scores = None if error else engine.log_probs(sequences)
    return {"lines": lines, "loads": len(loads), "error": error, "maps": maps, "scores": scores}


@pytest.mark.parametrize(
    ("fault", "lines"),
    [
        ("no memory", ["each rank of this node has frozen weights of its own: no memory left"]),
        ("unseen", ["this rank has frozen weights of its own in host memory: it is not seen"]),
        ("other node", []),
    ],
)
def test_where_memory_cannot_be_shared_each_rank_has_its_own(ranks, tiny, sequences, fault, lines):
    path = tiny("qwen3")
    first, second = ranks(2, load_badly, path, fault, sequences)
    assert (first["loads"], second["loads"]) == (1, 1)
    assert [*first["lines"], *second["lines"]] == lines
    assert not second["maps"]
    assert all(map(torch.equal, first["scores"], second["scores"]))


def test_an_error_of_loading_is_that_of_all_with_the_part(ranks, tiny, sequences):
    first, second = ranks(2, load_badly, tiny("qwen3"), "no weights", sequences)
    assert first["error"] == second["error"] != ""


def killed_while_it_shares(path):
    """The rank that has made the memory is killed while the other one maps it."""
    engine = make(path)
    engine.load_once(path)
    assert shared_maps()
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # which fails


def test_a_kill_leaves_nothing_behind(fresh_ranks, tiny):
    """The memory has no name, so there is none to delete."""
    shm = Path("/dev/shm")
    before = set(shm.iterdir())
    with pytest.raises(AssertionError, match="a rank ended with -9"):
        fresh_ranks(2, killed_while_it_shares, tiny("qwen3"))
    assert not [file for file in set(shm.iterdir()) - before if "hybridrl" in file.name]


class Driver:
    """The two calls of CUDA's runtime that pin memory, and what they were given."""

    def __init__(self, code=0):
        self.code, self.pinned, self.unpinned = code, [], []

    def cudaHostRegister(self, address, size, flags):
        self.pinned.append((address, size, flags))
        return self.code

    def cudaHostUnregister(self, address):
        self.unpinned.append(address)


def as_on_a_gpu(path, code, sequences):
    """Two ranks whose weights leave the device and come back. The device is a CPU's memory."""
    driver, engine = Driver(code), make(path)
    with (
        patch.object(node_copy, "_on_cpu", lambda _: False),
        patch.object(torch.cuda, "cudart", lambda: driver),
        patch.object(torch.cuda, "synchronize"),
    ):
        engine.load_once(path)
        wanted = engine.log_probs(sequences)
        host = engine._host
        engine.device = SimpleNamespace(type="cuda")
        if not host:
            return driver.pinned, driver.unpinned, None, wanted
        engine.offload()
        assert engine._host is host, "no other copy is made"
        assert not any(p.numel() for p in engine.model.parameters())
        engine.device = CPU
        engine.onload()
        assert engine.weights is Weights.here
        again = engine.log_probs(sequences)
        assert all(map(torch.equal, again, wanted))
        inode = [memory["inode"] for memory in shared_maps()]
        engine.parameters()["model.norm.weight"].zero_()
        assert not engine._host, "new weights have a new copy"
        return driver.pinned, driver.unpinned, inode, wanted


def test_a_gpus_copy_is_pinned_until_other_weights_come(ranks, tiny, sequences):
    path = tiny("qwen3")
    nbytes = sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(path).parameters())
    first, second = ranks(2, as_on_a_gpu, path, 0, sequences)
    for pinned, unpinned, _, _ in (first, second):
        ((address, size, flags),) = pinned
        assert address % mmap.PAGESIZE == 0
        assert size >= nbytes
        assert flags == 0
        assert unpinned == [address]
    assert first[2] == second[2] != []
    assert all(map(torch.equal, first[3], second[3]))


def test_memory_that_cuda_does_not_pin_is_not_shared(ranks, tiny, sequences):
    first, second = ranks(2, as_on_a_gpu, tiny("qwen3"), 2, sequences)
    assert first[2] is None
    assert second[2] is None
    assert all(map(torch.equal, first[3], second[3]))


def test_memory_of_another_process_is_recognized():
    """A pid may belong to a process that knows nothing of the memory."""
    memory = SharedMemory.create(4096)
    address = memory.address
    assert SharedMemory.open(address).size == 4096
    wrong = MemoryAddress(address.pid, address.descriptor, address.inode + 1, address.size)
    with pytest.raises(OSError, match="another process's file"):
        SharedMemory.open(wrong)
    shared, own = memory.map(), memory.map(private=True)
    memory.close()
    shared[:2] = b"ab"
    assert own[:2] == b"ab"
    own[:2] = b"cd"
    assert shared[:2] == b"ab"
    with pytest.raises(FileNotFoundError):
        SharedMemory.open(address)


def test_pinned_memory_is_unpinned_once():
    """In one process, which a dry run's probes can watch."""
    driver, memory = Driver(), SharedMemory.create(4096)
    parameter = torch.nn.Parameter(torch.zeros(3, 5), requires_grad=False)
    with (
        patch.object(node_copy, "_on_cpu", lambda _: False),
        patch.object(torch.cuda, "cudart", lambda: driver),
        patch.object(torch.cuda, "synchronize") as synchronize,
    ):
        copy = node_copy._take(memory, [parameter])
        assert [tensor.shape for tensor in copy.tensors] == [parameter.shape]
        copy.release()
        copy.release()
    assert [address for address, _, _ in driver.pinned] == driver.unpinned
    synchronize.assert_called_once()
    memory.close()
