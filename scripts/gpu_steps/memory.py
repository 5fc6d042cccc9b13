"""Peak memory of a rank in each phase of a step, and what a plan needs to predict it."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_steps.figures import Figures
from gpu_steps.mismatch import generate
from gpu_steps.ranks import ActorRank, one_rank, run_config
from gpu_steps.sizes import Sizes, sizes_of
from gpu_steps.steps import Settings
from gpu_steps.training import sequences
from hybridrl.algorithms.losses import ReinforceLoss
from hybridrl.config import Config
from hybridrl.data import Item
from hybridrl.flow.graph import UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.system.memory import resident_bytes
from hybridrl.workers.store import StoredSample
from hybridrl.workers.training import UpdateShare, train

_UPDATES = 2  # the second is a run's usual one, which has moments
_SAMPLES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanKeys:
    """What the peaks depend on: a plan with these keys predicts them."""

    shape: dict[str, Any]
    parameters: int
    ranks: int
    master_dtype: str
    compute_dtype: str
    rollout_dtype: str
    attention: str
    row_tokens: int
    """Tokens of the packed row of a micro-batch."""
    scored_tokens: int
    """Tokens of responses in the row, whose logits are computed."""
    micro_batches: int
    activations: str
    kv_cache_tokens: int
    """That the KV cache has room for."""
    kv_bytes_per_token: int
    decode_rows: int
    bucket_mb: float


_NOT_PLANNED = {
    "forward_backward": "part of update",
    "optimizer": "part of update",
    "offloaded": "the plan has no such phase",
}


def measure(settings: Settings, figures: Figures) -> None:
    """The peaks, measured, and what the plan says of them."""
    with one_rank(settings) as device:
        config = run_config(settings)
        keys, peaks = measured_peaks(settings, config, device)
    figures.detail("plan_keys", asdict(keys))
    figures.detail("peaks", peaks)
    planned, reason = plan_of(config, keys)
    if reason:
        figures.skip("planned_peaks", reason)
    figures.detail("planned", planned)
    report_peaks(peaks, planned, figures)


def plan_of(config: Config, keys: PlanKeys) -> tuple[dict[str, int], str]:
    """Planned bytes by phase; none where the plan needs a package that is not here, and why."""
    try:
        from gpu_steps.planned import planned_peaks
    except ImportError as error:
        return {}, f"the memory plan cannot be computed here: {error}"
    row = keys.row_tokens, keys.scored_tokens
    return planned_peaks(config, keys.kv_cache_tokens, row, keys.decode_rows), ""


def report_peaks(
    peaks: dict[str, dict[str, int]], planned: dict[str, int], figures: Figures
) -> None:
    """A figure a phase: `allocated` on a GPU, `resident` on a CPU, next to the plan's."""
    for phase, held in peaks.items():
        size = held.get("allocated", held.get("resident", 0))
        about: dict[str, object] = {}
        if phase in planned:
            about = {
                "planned_gib": round(planned[phase] / 2**30, 3),
                "planned_by_measured": round(planned[phase] / size, 3) if size > 0 else "nothing",
            }
        elif planned:
            about = {"planned": _NOT_PLANNED[phase]}
        about |= {f"{name}_gib": round(n / 2**30, 3) for name, n in held.items()}
        figures.add(f"peak_{phase}", size / 2**30, "GiB", **about)


def measured_peaks(
    settings: Settings, config: Config, device: torch.device
) -> tuple[PlanKeys, dict[str, dict[str, int]]]:
    """Bytes by phase and kind, of a rank that goes through a step and the next one's switch."""
    meter = PeakMeter(device)
    sizes, peaks = sizes_of(settings), {}
    rank = ActorRank(config, device)
    engine = rank.trainer.train_engine
    peaks["build"] = meter.take()

    rank.switch()  # a run's usual switch is the later one, with moments
    meter.take()
    generate(rank, sizes, _SAMPLES)
    peaks["decode"] = meter.take()

    rank.residency.enter_training()
    rank.residency.activate(engine)
    stage = UpdateStage(name="update", loss=ReinforceLoss(), fields={}, role="actor")
    share = _share(rank, sizes)
    for _ in range(_UPDATES):
        hook = engine.optimizer.register_step_pre_hook(
            lambda *_: peaks.update(forward_backward=meter.take())
        )
        meter.take()
        train([rank.trainer.update_steps(stage, share)], None)
        peaks["optimizer"] = meter.take()
        hook.remove()
    in_update = peaks["forward_backward"], peaks["optimizer"]
    peaks["update"] = {kind: max(peak[kind] for peak in in_update) for kind in in_update[0]}
    rank.switch()
    peaks["switch"] = meter.take()
    rank.residency.enter_training()
    rank.residency.activate(None)
    meter.take()
    peaks["offloaded"] = meter.take()

    stats = rank.generator.rollout.stats()
    keys = PlanKeys(
        shape=sizes.shape,
        parameters=engine.num_parameters,
        ranks=1,
        master_dtype="float32",
        compute_dtype=config.model.compute_dtype.value,
        rollout_dtype=config.rollout.dtype.value,
        attention=engine.attention.value,
        row_tokens=sizes.row_tokens,
        scored_tokens=sum(rank.store[id].response_tokens for id in share.ids),
        micro_batches=1,
        activations=config.trainer.activations.value,
        kv_cache_tokens=stats.kv_blocks_total * config.rollout.block_size,
        kv_bytes_per_token=stats.kv_bytes_per_token,
        decode_rows=_SAMPLES,
        bucket_mb=config.rollout.layout.bucket_bytes(device.type) / 2**20,
    )
    return keys, peaks


def _share(rank: ActorRank, sizes: Sizes) -> UpdateShare:
    """An update of one packed row, whose samples go to the rank's store."""
    rows = sequences(sizes, micro_batches=1)
    ids = tuple(SampleId(i, k=1) for i in range(len(rows)))
    for id, row in zip(ids, rows, strict=True):
        prompt = tuple(row.ids[: -row.response_tokens].tolist())
        item = Item("", prompt, "", (), "", {})
        rank.store.add(id, StoredSample(row.response_tokens, item, {"tokens": row.ids}))
    scalars = {id: {"advantages": 1.0} for id in ids}
    return UpdateShare((ids,), scalars, dict.fromkeys(ids, 0), ())


class PeakMeter:
    """The most memory since the last reading, in bytes by kind.

    On a GPU `allocated` and `reserved` by torch's allocator, and `device`, in use by any process at
    the time of the reading. On a CPU `resident`, above what the process had at first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline = resident_bytes()
        self.take()

    def take(self) -> dict[str, int]:
        """The peaks since the last call, which begin anew."""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            peaks = {
                "allocated": torch.cuda.max_memory_allocated(self._device),
                "reserved": torch.cuda.max_memory_reserved(self._device),
                "device": total - free,
            }
            torch.cuda.reset_peak_memory_stats(self._device)
            return peaks
        peak = _peak_resident() - self._baseline
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        return {"resident": peak}


def _peak_resident() -> int:
    """Most memory that this process has had (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")
