"""Predicted updates against measured ones, on two ranks of one thread under every layout.

`hybridrl plan calibrate` measures this machine once. Then updates of the same samples are measured
under fsdp, replicas, tp, and pp with each schedule, in turns. The model is the tiny one, with more
layers than calibration has seen. A line's value is the predicted seconds, its baseline the measured
ones. Two more lines are the median and the worst error of all layouts. Another one says how much
longer the layout with the least predicted seconds takes than the best one. The lines `plan_run_*`
are the same by costs that are scaled to the micro-batches of one layout, as those of a run
(`hybridrl plan calibrate --run`). In the same turns a model of twice the width is measured. The
lines `plan_wide_*` are its predictions by the calibration. Those of `plan_size_*` are by the costs
that were scaled to the other model: how well one size predicts another.
"""

import argparse
import logging
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from lines import line, show, take_turns
from torch.multiprocessing.spawn import spawn
from transformers import AutoConfig

from hybridrl.algorithms.losses import CrossEntropyLoss
from hybridrl.config import (
    Config,
    ModelConfig,
    PipelineSchedule,
    TinyModelConfig,
    TrainerConfig,
    TrainLayoutConfig,
    compose,
)
from hybridrl.config.schedule import SerialScheduleConfig
from hybridrl.doctor.calibrate import calibrate
from hybridrl.engines.train.engine import TrainEngine
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.models.shape import model_shape
from hybridrl.models.tiny import make_tiny_model
from hybridrl.pipelines.balance import balance
from hybridrl.pipelines.problem import PassKind
from hybridrl.pipelines.recorded import RecordedPass
from hybridrl.planner.mapping import (
    ACTOR,
    DeviceMapping,
    GenLayout,
    PlannedRole,
    SampleLength,
    TrainLayout,
)
from hybridrl.planner.mapping_costs import MappingCosts
from hybridrl.planner.model_shape import ModelShape
from hybridrl.planner.recorded_costs import scaled, scales_of

RANKS, TOKENS = 2, 2048
DEEP, WIDE = "deep", "wide"
MODELS = {
    DEEP: TinyModelConfig(num_layers=8),
    WIDE: TinyModelConfig(
        hidden_size=384, intermediate_size=1024, num_heads=12, num_kv_heads=4, num_layers=4
    ),
}
"""Calibration sees the width of `deep` and half of it, and 1 to 4 layers."""
RECORDED = (DEEP, "fsdp_2")
LAYOUTS = {
    "fsdp_2": TrainLayout(fsdp=2, micro_batch_tokens=TOKENS),
    "replicas_2": TrainLayout(replicas=2, micro_batch_tokens=TOKENS),
    "tp_2": TrainLayout(tp=2, micro_batch_tokens=TOKENS),
    **{
        f"pp_2_{schedule.value}": TrainLayout(pp=2, schedule=schedule, micro_batch_tokens=TOKENS)
        for schedule in PipelineSchedule
    },
}


def samples_of(number: int, longest: int) -> list[SampleLength]:
    """Long-tailed responses to prompts of 16 to 32 tokens."""
    draw = random.Random(0)
    return [
        SampleLength(draw.randint(16, 32), min(longest - 32, round(draw.lognormvariate(4.5, 0.7))))
        for _ in range(number)
    ]


def measure(
    rank: int,
    store: str,
    models: Mapping[str, str],
    samples: Sequence[SampleLength],
    rounds: int,
    out: str,
) -> None:
    """One rank: all layouts of all models in turns; rank 0 writes the seconds of each."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    ids = [torch.randint(3, 60, (sample.tokens,)) for sample in samples]
    sequences = [
        TrainSequence(tokens, sample.response) for tokens, sample in zip(ids, samples, strict=True)
    ]
    own = balance([sample.tokens for sample in samples], RANKS)[rank]
    sides: dict[tuple[str, str], Callable[[], float]] = {}
    for (model, path), (name, layout) in product(models.items(), LAYOUTS.items()):
        engine = TrainEngine(
            path,
            model=ModelConfig(),
            trainer=TrainerConfig(
                max_tokens_per_micro_batch=layout.micro_batch_tokens,
                layout=TrainLayoutConfig(
                    pp=layout.pp,
                    replicas=layout.replicas,
                    fsdp=layout.fsdp,
                    tp=layout.tp,
                    schedule=layout.schedule,
                ),
            ),
            device=torch.device("cpu"),
        )
        sides[model, name] = partial(_seconds, engine, [sequences[i] for i in own])
        if (model, name) == RECORDED:
            clock = engine.clock
    seconds = take_turns(sides, rounds)
    clock.enabled = True
    for _ in range(3):
        sides[RECORDED]()
    if rank == 0:
        torch.save((seconds, [(each.kind.value, *each[1:]) for each in clock.take()]), out)
    dist.destroy_process_group()


def _seconds(engine: TrainEngine, sequences: Sequence[TrainSequence]) -> float:
    """Seconds of an update, from the moment that all ranks are there."""
    dist.barrier()
    start = time.perf_counter()
    engine.update(sequences, CrossEntropyLoss())
    return time.perf_counter() - start


def report(
    costs: MappingCosts,
    shape: ModelShape,
    samples: Sequence[SampleLength],
    measured: dict[str, list[float]],
    prefix: str,
) -> None:
    """A line for each layout, and those of all; their names begin with `prefix`."""
    role = PlannedRole(name="actor", shape=shape, trained=True)
    predicted = {
        name: costs.update_s(role, layout, range(RANKS), samples)
        for name, layout in LAYOUTS.items()
    }
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    for name, seconds in measured.items():
        same = [predicted[name]] * len(seconds)
        show(line(f"{prefix}_{name}", "s", "closer to 1", same, seconds))
    errors = sorted(abs(predicted[name] / medians[name] - 1) for name in LAYOUTS)
    chosen = min(predicted, key=lambda name: predicted[name])
    best = min(medians, key=lambda name: medians[name])
    figures = {
        "median_error": (statistics.median(errors), 0.05),
        "worst_error": (errors[-1], 0.1),
        "chosen_over_best": (medians[chosen] / medians[best] - 1, 0.03),
    }
    for name, (value, wanted) in figures.items():
        extra = {"chosen": chosen, "best": best} if name == "chosen_over_best" else {}
        show(
            {
                "name": f"{prefix}_{name}",
                "value": round(value, 4),
                "unit": "share",
                "wanted": wanted,
                "better": "lower",
                **extra,
            }
        )


def _scaled(costs: MappingCosts, shape: ModelShape, passes: Sequence[RecordedPass]) -> MappingCosts:
    """By the passes of the recorded model and layout alone."""
    roles = [PlannedRole(name=ACTOR, shape=shape, trained=True)]
    mapping = DeviceMapping(
        pools={ACTOR: (ACTOR,)},
        ranks={ACTOR: RANKS},
        train={ACTOR: LAYOUTS[RECORDED[1]]},
        gen=GenLayout(),
        schedule=SerialScheduleConfig(),
    )
    scales = scales_of({ACTOR: passes}, None, costs, roles, mapping)
    layers = scaled(costs.layer_costs, scales, None, "run")
    return MappingCosts(layers, costs.cluster, costs.row_tokens)


def _config() -> Config:
    """The config of calibration: the model as it comes, two ranks."""
    compose.register()
    config = compose.check(
        ["cluster.device=cpu", f"cluster.ranks={RANKS}", "cluster.threads_per_rank=1"]
    )
    config.trainer.max_tokens_per_micro_batch = TOKENS
    config.resolve_device(0, "this machine")
    return config


def main() -> None:
    """Calibrate, measure, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = _config()
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        costs = calibrate(config, model_shape(config.model))
        models = {name: str(folder / name) for name in MODELS}
        for name, tiny in MODELS.items():
            make_tiny_model(models[name], tiny, seed=0)
        samples = samples_of(args.samples, min(tiny.max_positions for tiny in MODELS.values()))
        out = str(folder / "times")
        spawn(measure, (str(folder / "store"), models, samples, args.rounds, out), nprocs=RANKS)
        seconds, passes = torch.load(out)
        shapes = {
            name: ModelShape.of_config(AutoConfig.from_pretrained(path).to_dict())
            for name, path in models.items()
        }
    recorded = [RecordedPass(PassKind(kind), *rest) for kind, *rest in passes]
    of_run = _scaled(costs, shapes[DEEP], recorded)
    for prefix, of_costs, model in (
        ("plan_update", costs, DEEP),
        ("plan_run", of_run, DEEP),
        ("plan_wide", costs, WIDE),
        ("plan_size", of_run, WIDE),
    ):
        measured = {name: seconds[model, name] for name in LAYOUTS}
        report(of_costs, shapes[model], samples, measured, prefix)


if __name__ == "__main__":
    main()
