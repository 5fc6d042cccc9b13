"""One rank of a run on fake GPUs, through the phases of a step."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoTokenizer

from gpu_dry.case import ROWS, Case, prompt_lengths
from gpu_dry.fake_device import Counts, FakeDevice
from gpu_dry.fake_files import files_without_values
from gpu_dry.planned import planned
from gpu_dry.whole import multiplied
from gpu_dry.world import (
    joined,
    kernels,
    mirrors_without_values,
    num_layers,
    weights_without_values,
    write_model,
)
from hybridrl.algorithms.critic import ValueLoss
from hybridrl.algorithms.losses import ClippedLoss
from hybridrl.checkpoint import distributed
from hybridrl.checkpoint.hf import save_hf
from hybridrl.data import Item
from hybridrl.engines.train.adamw import local_shard
from hybridrl.flow.executor import Park, Parked, Resume, Sampling, Submit
from hybridrl.flow.graph import ComputeStage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers import generator as generator_module
from hybridrl.workers.colocated import ColocatedActor
from hybridrl.workers.ema import MovingAverage
from hybridrl.workers.role_factory import ActorRoleFactory
from hybridrl.workers.staying_roles import StayingRoles
from hybridrl.workers.store import SampleStore, StoredSample
from hybridrl.workers.training import UpdateShare, score, train

AVERAGE = "average"


class DryRun:
    """The phases of a step of one case; `counts` has what each did.

    `loads` has the peaks of the parts of the first phase.
    """

    def __init__(self, case: Case, path: Path, device: FakeDevice, cuda: torch.device) -> None:
        self.case, self.device, self.cuda = case, device, cuda
        self.average: MovingAverage | None = None
        self.config = case.config(path)
        self.path, self.folder = str(path), path
        self.counts: dict[str, Counts] = {}
        self.loads: dict[str, int] = {}
        self.store = SampleStore()
        self.tokenizer = AutoTokenizer.from_pretrained(path)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        with self.device.phase(self.counts, name):
            yield

    def run(self) -> None:
        """Every phase once, in the order of a step."""
        self._build()
        if self.case.only_trains:
            self._update(self._samples())
            self.residency.activate(None)
            return
        if not self.case.lora:
            with self.phase("build average"):
                self.average = MovingAverage(self.trainer.train_engine, decay=0.9)
        self._generate()
        ids = self._samples()
        self._score(ids)
        self._train(ids)
        self._resume()
        if self.case.critic:
            self._train_critic(ids)

    def _build(self) -> None:
        """The actor with its rollout engine, and the factory of the other roles."""
        with self.phase("build"):
            staying = StayingRoles(self.case.staying)
            model = self.config, self.path, self.tokenizer, self.store, self.cuda
            actor = self.actor = ColocatedActor(*model, staying)
            self.trainer, self.residency = actor.trainer, actor.residency
            self.roles = ActorRoleFactory(*model, actor)
        if self.case.staying:
            with self.phase("moments of a resumed run"):  # or the plan has more than there is
                self.trainer.train_engine.resume(0, 0, moments=True)

    def _generate(self) -> None:
        """Switch, prefill, two decode steps, a sample parked with its cache and resumed."""
        generator = self.actor.generator
        with self.phase("switch"):
            self.actor.enter_generation()
        self.device.integer = 3  # a token that ends nothing
        prompts = [
            Submit((SampleId(i),), _item(length), Sampling(256))
            for i, length in enumerate(prompt_lengths(ROWS))
        ]
        with self.phase("prefill and first decode"):
            generator.advance(prompts, 1)
        with self.phase("decode"):
            generator.advance([], 1)
        ids = (SampleId(0), SampleId(1))
        with self.phase("park"):
            _, (parked,), *_ = generator.advance([Park(ids, with_kv=True)], 0)
        assert isinstance(parked, Parked)
        with self.phase("resume"):
            generator.advance([Resume(ids, parked)], 1)
        everything = tuple(SampleId(i) for i in range(ROWS))
        generator.advance([Park(everything)], 0)
        narrow = Sampling(256, temperature=0.7, top_p=0.9, top_k=50)
        generator.advance([Submit((SampleId(ROWS),), _item(256), narrow)], 1)
        with self.phase("decode of top-k and top-p"):
            generator.advance([], 1)
        generator.advance([Park((SampleId(ROWS),))], 0)
        self.device.integer = 1

    def _score(self, ids: tuple[SampleId, ...]) -> None:
        """Log-probabilities of the weights that generated, and of a reference."""
        self.residency.release_idle_cache()
        stage = ComputeStage(name="old", outputs=("old_log_probs",))
        old_policy = self.roles.old_policy()
        assert old_policy is not None
        with self.phase("old policy"):
            old_policy.compute(stage, ids)
        with self.phase("build reference"):
            reference = self.roles.frozen_copy()
        stage = ComputeStage(name="reference", outputs=("reference_log_probs",))
        self.residency.activate(reference)
        with self.phase("reference"):
            reference.compute(stage, ids)
        self.residency.activate(None)
        with self.phase("judge"):
            judge = self.roles.neural_judge("reward", self.actor.generator.parallel)
            self.residency.activate(judge)
            judge.compute(ComputeStage(name="judge", scalars=("reward", "status")), ids)

    def _train(self, ids: tuple[SampleId, ...]) -> None:
        """Two optimizer steps: the second is a run's usual one, which has moments."""
        self._update(ids)
        if self.average is not None:
            with self.phase("average"):
                self.average.follow()
        with self.phase("save"):
            dtype = self.config.model.compute_dtype
            save_hf(self.trainer.train_engine, self.folder / "hf", self.tokenizer, dtype)
            distributed.save(self.folder / "resume", self.trainer.train_engine, self._averages())
        with self.phase("switch after updates"):
            self.actor.enter_generation()
        self.residency.enter_training()
        with self.phase("onload with moments"):
            self.residency.activate(self.trainer.train_engine)
        with self.phase("offload"):
            self.residency.activate(None)
        shards = self.trainer.train_engine.named_shards().values()
        place = "cuda" if "actor" in self.case.staying else "cpu"
        devices = {shard.to_local().device.type for shard in shards}
        assert devices == {place}, "offloaded weights are on the host, others on the device"

    def _update(self, ids: tuple[SampleId, ...]) -> None:
        self.residency.enter_training()
        with self.phase("onload"):
            self.residency.activate(self.trainer.train_engine)
        stage = UpdateStage(name="update", loss=ClippedLoss(kl_coef=0.1), fields={}, role="actor")
        scalars = {id: {"advantages": 1.0} for id in ids}
        share = UpdateShare(
            (ids,), scalars, dict.fromkeys(ids, self.trainer.train_engine.version), ()
        )
        for name in ("first update", "update"):
            with self.phase(name):
                train([self.trainer.update_steps(stage, share)], None)

    def _resume(self) -> None:
        """Read the checkpoint; copies of the trained weights and of their average."""
        engine, averages = self.trainer.train_engine, self._averages()
        assert {x.to_local().device.type for x in averages.values()} <= {"cpu"}, "it is on the host"
        with self.phase("load"):
            distributed.load(
                self.folder / "resume", engine, distributed.progress_of(engine), averages
            )
            if self.average is not None:
                self.average.restore(distributed.average_shards(averages, AVERAGE))
        with self.phase("copy weights"):
            reference = self.roles.frozen_copy()
        if self.average is not None:
            self.residency.activate(reference)
            dtype = self.config.model.compute_dtype
            with self.phase("copy average"):
                self.actor.copy_weights(reference.parameters(), dtype, self.average.shards)
        self.residency.activate(engine)
        state = [x for states in engine.optimizer.state.values() for x in states.values()]
        devices = {local_shard(x).device.type for x in state}
        assert devices == {"cuda"}, "the optimizer is with its weights"
        self.residency.activate(None)

    def _averages(self) -> distributed.NamedTensors:
        if self.average is None:
            return {}
        return distributed.named_average(self.average.as_tensors(), AVERAGE)

    def _train_critic(self, ids: tuple[SampleId, ...]) -> None:
        """Values, and two optimizer steps of a value model that starts as the actor."""
        weights = self.trainer.train_engine.weights()
        with self.phase("build critic"):
            critic = self.roles.value_model("critic", weights, stays="critic" in self.case.staying)
        self.residency.activate(critic.train_engine)
        with self.phase("values"):
            score([critic.scoring(ComputeStage(name="values", outputs=("values",)), ids)], None)
        for id in ids:
            self.store[id].tensors["returns"] = torch.ones(self.store[id].response_tokens)
        stage = UpdateStage(
            name="update critic", loss=ValueLoss(), fields={"returns": "returns"}, role="critic"
        )
        share = UpdateShare((ids,), {id: {} for id in ids}, dict.fromkeys(ids, 0), ())
        for name in ("first update of the critic", "update of the critic"):
            with self.phase(name):
                train([critic.update_steps(stage, share)], None)
        self.residency.activate(None)

    def _samples(self) -> tuple[SampleId, ...]:
        """Finished samples in the store."""
        lengths = self.case.samples
        ids = tuple(SampleId(i, k=1) for i in range(len(lengths)))
        names = ["log_probs"]
        if self.case.only_trains:  # nothing scores
            names += ["old_log_probs", "reference_log_probs"]
        for id, tokens in zip(ids, lengths, strict=True):
            prompt = tokens // 4
            tensors = {"tokens": torch.full((tokens,), 3)}
            tensors |= {name: torch.zeros(tokens - prompt) for name in names}
            self.store.add(id, StoredSample(tokens - prompt, _item(prompt), tensors))
        return ids


def _item(length: int) -> Item:
    return Item("", (3,) * length, "", (), "", {})


def run_case(case: Case, device: FakeDevice) -> dict[str, Any]:
    """The layers of the case's model, and what every phase of the whole model does.

    `memory` has the peak of each phase beside the memory plan's, in bytes, at the first depth.
    `attention` has the calls of each phase for each of that depth's layers.
    """
    first = run_depth(case, case.layers and case.layers[0], device)
    if case.layers is None or case.only_trains:
        return first
    second = run_depth(case, case.layers[1], device, measured=False)
    whole = multiplied(first, second, case.layers, num_layers(case.model))
    return whole | {name: first[name] for name in ("memory", "attention")}


def run_depth(
    case: Case, layers: int | None, device: FakeDevice, measured: bool = True
) -> dict[str, Any]:
    """What every phase does with the model cut to `layers`; None is all of it.

    Without `measured` memory is not counted, which is faster.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = write_model(Path(folder), case.model, layers)
        run = run_phases(case, path, device, measured)
        shape = AutoConfig.from_pretrained(path)
        gen_stage = run.actor.generator.parallel.pp_rank
        sizes = planned(case, run.config, shape, gen_stage) if measured else {}
    phases = {name: counts.summary() for name, counts in run.counts.items()}
    peaks = {name: counts.peak for name, counts in run.counts.items()} | run.loads
    memory = {name: [peaks[name], size] for name, size in sizes.items() if name in peaks}
    depth = shape.num_hidden_layers
    attention = {name: counts.attention / depth for name, counts in run.counts.items()}
    return {"layers": depth, "phases": phases, "memory": memory, "attention": attention}


def run_phases(
    case: Case,
    path: Path,
    device: FakeDevice,
    measured: bool,
    phases: Callable[[DryRun], None] = DryRun.run,
) -> DryRun:
    """All phases with the model at `path`, or these."""
    with ExitStack() as stack:
        cuda = stack.enter_context(joined(case.rank, case.ranks, case.strict))
        for surroundings in (
            weights_without_values(device),
            mirrors_without_values(device),
            files_without_values(device),
            kernels(device, case.flash),
        ):
            stack.enter_context(surroundings)
        # Backward on this thread, as the fake device has no thread of its own.
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(device)
        if measured:
            stack.enter_context(device.memory)
        stack.enter_context(mock.patch.object(device, "answers", case.answers))
        run = DryRun(case, path, device, cuda)
        stack.enter_context(noted_loads(device, run.loads))
        phases(run)
    return run


@contextmanager
def noted_loads(device: FakeDevice, peaks: dict[str, int]) -> Iterator[None]:
    """While an actor is built: what its weights take, then what its rollout engine takes."""
    make = generator_module.make_rollout_engine

    def noted(*args: Any) -> Any:
        peaks["load actor"] = device.memory.peak("cuda")
        device.memory.restart()
        engine = make(*args)
        peaks["load rollout engine"] = device.memory.peak("cuda")
        return engine

    with mock.patch.object(generator_module, "make_rollout_engine", noted):
        yield
