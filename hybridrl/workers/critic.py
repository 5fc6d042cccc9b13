"""Critics: value models whose values make advantages."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from hybridrl.engines.train.fused_update import ScoreInputs
from hybridrl.engines.train.interface import TrainSequence
from hybridrl.flow.graph import Stage, UpdateStage
from hybridrl.flow.sample import SampleId
from hybridrl.workers.roles import Scalars
from hybridrl.workers.training import RoleScoring, UpdateShare, UpdateSteps
from hybridrl.workers.value_model import ValueModel


class Critic(ValueModel):
    """A value of the state before every response token."""

    _values = "values"  # the field that it fills

    def scoring(self, stage: Stage, ids: Sequence[SampleId]) -> RoleScoring:
        """Values of the states before every response token, stored as the stage's output field."""
        (self._values,) = stage.outputs
        samples = [self.store[id] for id in ids]
        sequences = [TrainSequence(s.tensors["tokens"], s.response_tokens) for s in samples]

        def keep(values: Sequence[torch.Tensor]) -> tuple[Scalars, tuple[str, ...]]:
            for sample, value in zip(samples, values, strict=True):
                sample.tensors[self._values] = value
            return {}, (self._values,)

        inputs = ScoreInputs(sequences=sequences, alone=self.config.strict)
        return RoleScoring(engine=self.train_engine, inputs=inputs, keep=keep)

    def update_steps(self, stage: UpdateStage, share: UpdateShare) -> UpdateSteps:
        """The steps of training on this rank's share.

        `explained_variance` is that of the values before the update.
        """
        steps = super().update_steps(stage, share)
        steps.more_metrics = lambda: self._explained(stage, share)
        return steps

    def _explained(self, stage: UpdateStage, share: UpdateShare) -> dict[str, float]:
        """`explained_variance`, where the returns and values are there."""
        returns = stage.fields.get("returns")
        samples = [self.store[id] for id in share.ids]
        read = {returns, self._values}
        if returns is None or not all(read <= sample.tensors.keys() for sample in samples):
            return {}
        pairs = [(s.of_model(returns), s.of_model(self._values)) for s in samples]
        return {"explained_variance": explained_variance(pairs, self.train_engine.device)}


def explained_variance(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> float:
    """1 - Var(returns - values) / Var(returns) over all tokens of all ranks; collective.

    `pairs` are this rank's returns and values [the model's tokens], perhaps none. 1 is a perfect
    critic, 0 is as good as a constant. If all returns are equal it is 0, too. In float64.
    """
    empty = torch.zeros(0, dtype=torch.float64)
    returns = torch.cat([empty, *(returns.double() for returns, _ in pairs)])
    errors = returns - torch.cat([empty, *(values.double() for _, values in pairs)])
    sums = [x for y in (returns, errors) for x in (y.sum(), y.square().sum())]
    totals = torch.stack([torch.tensor(float(len(returns))).double(), *sums]).to(device)
    dist.all_reduce(totals)
    n, *sums = totals.tolist()
    if not n:
        return 0.0
    r, rr, e, ee = (x / n for x in sums)
    variance = rr - r**2
    return 1 - (ee - e**2) / variance if variance > 0 else 0.0
