"""What a server records for `hybridrl watch`: its optimizer steps, and what became of models."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from hybridrl.serving.requests import (
    ClientAnswer,
    CreateModel,
    ForwardBackward,
    LoadModel,
    LossOutputs,
    OptimStep,
    Save,
    Saved,
    Stepped,
    Unload,
)
from hybridrl.serving.sampling import OpenSampling
from hybridrl.serving.training import ModelRequest
from hybridrl.telemetry.run import Telemetry


@dataclass(slots=True)
class _Gradient:
    """What a model's gradient is the sum of, since its last step."""

    loss: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class ServerHistory:
    """A row of metrics for each optimizer step of any model, and an event for each model's change.

    `step` counts the steps of all models. A row has the model's `loss` (the sum that clients ask
    for), `grad_norm` and `lr`, and `loss/MODEL` and `grad_norm/MODEL` for a curve by model.
    `train_tokens` are those of its gradient. Since the row before: `response_tokens_mean` of the
    responses, `wait_s` of the training requests (mean seconds until they began), `switches`.
    """

    telemetry: Telemetry
    step: int
    _gradients: dict[str, _Gradient] = field(default_factory=dict)
    _lengths: list[int] = field(default_factory=list)
    _waits: list[float] = field(default_factory=list)
    _switches: int = 0

    def trained(self, request: ModelRequest, answer: ClientAnswer, waited: float) -> None:
        """Record a request of training that is answered, and the seconds until it began."""
        self._waits.append(waited)
        model, steps = request.model, self.step
        match request, answer:
            case ForwardBackward(backward=True), LossOutputs():
                gradient = self._gradients.setdefault(model, _Gradient())
                gradient.loss += answer.metrics["loss:sum"]
                gradient.tokens += sum(len(datum.tokens) for datum in request.data)
            case OptimStep(), Stepped():
                self._log(model, answer.metrics)
            case CreateModel(), _:
                self.telemetry.event("model", step=steps, model=model, what="created")
            case LoadModel(), _:
                self.telemetry.event("model", step=steps, model=model, what=f"is {request.path}")
            case Save(files=True), Saved():
                self.telemetry.event("model", step=steps, model=model, what=f"saved {answer.path}")
            case Unload(), _:
                self._gradients.pop(model, None)
                self.telemetry.event("model", step=steps, model=model, what="unloaded")

    def sampled(self, done: Sequence[OpenSampling]) -> None:
        """Record requests for samples that are answered."""
        self._lengths += [len(drawn.tokens) for one in done for drawn in one.drawn.values()]
        del self._lengths[:-_MOST_LENGTHS]

    def switched(self) -> None:
        """Record that the ranks have changed between training and generation, or snapshots."""
        self._switches += 1

    def _log(self, model: str, metrics: dict[str, float]) -> None:
        self.step += 1
        gradient = self._gradients.pop(model, _Gradient())
        own = {"loss": gradient.loss, "grad_norm": metrics["grad_norm"]}
        row = {
            **own,
            **{f"{name}/{model}": value for name, value in own.items()},
            "lr": metrics["lr"],
            "train_tokens": float(gradient.tokens),
            "wait_s": fmean(self._waits),
            "switches": float(self._switches),
        }
        if self._lengths:
            row["response_tokens_mean"] = fmean(self._lengths)
        self.telemetry.log(self.step, row)
        self._lengths, self._waits, self._switches = [], [], 0


_MOST_LENGTHS = 10_000
"""Responses that are remembered until the next step, which a server may never be asked for."""
