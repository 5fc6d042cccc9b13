"""What a server records for `hybridrl watch`: its optimizer steps, and what became of models."""

from collections import deque
from collections.abc import Iterator, Sequence
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


_MOST = 10_000
"""Responses and waits that are remembered until the next step, which may never be asked for."""


def _figures() -> deque[float]:
    return deque(maxlen=_MOST)


@dataclass(slots=True)
class _Window:
    """What has happened since the last row: to one model, or to all."""

    waits: deque[float] = field(default_factory=_figures)
    sample_waits: deque[float] = field(default_factory=_figures)
    lengths: deque[float] = field(default_factory=_figures)
    switches: int = 0

    def metrics(self) -> dict[str, float]:
        """The row's metrics; a mean of nothing is left out."""
        lists = {
            "wait_s": self.waits,
            "sample_wait_s": self.sample_waits,
            "response_tokens_mean": self.lengths,
        }
        means = {name: fmean(values) for name, values in lists.items() if values}
        return {**means, "switches": float(self.switches)}


@dataclass(slots=True)
class ServerHistory:
    """A row of metrics for each optimizer step of any model, and an event for each model's change.

    `step` counts the steps of all models. A row has the model's `loss` (the sum that clients ask
    for), `grad_norm` and `lr`; `train_tokens` are those of its gradient. Since the row before:
    `response_tokens_mean` of the responses, `wait_s` of the training requests and `sample_wait_s`
    of those for samples (mean seconds until they began), `switches`. `loss/MODEL`,
    `grad_norm/MODEL` and these four are the model's own, since its own last row or its creation.

    Invariant: a model has a window from its creation on until it is unloaded. What concerns another
    one, the base or the checkpoint of a model that is gone, counts in the window of all alone.
    """

    telemetry: Telemetry
    step: int
    _gradients: dict[str, _Gradient] = field(default_factory=dict)
    _all: _Window = field(default_factory=_Window)
    _of: dict[str, _Window] = field(default_factory=dict)

    def trained(self, request: ModelRequest, answer: ClientAnswer, waited: float) -> None:
        """Record a request of training that is answered, and the seconds until it began."""
        model, steps = request.model, self.step
        if isinstance(request, CreateModel):
            self._of[model] = _Window()
        for window in self._windows(model):
            window.waits.append(waited)
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
                del self._of[model]
                self.telemetry.event("model", step=steps, model=model, what="unloaded")

    def began(self, requests: Sequence[OpenSampling], now: float) -> None:
        """Record requests for samples whose turn has come."""
        for one in requests:
            for window in self._windows(one.snapshot.model):
                window.sample_waits.append(now - one.since)

    def sampled(self, done: Sequence[OpenSampling]) -> None:
        """Record requests for samples that are answered."""
        for one in done:
            lengths = [len(drawn.tokens) for drawn in one.drawn.values()]
            for window in self._windows(one.snapshot.model):
                window.lengths += lengths

    def switched(self, model: str | None) -> None:
        """Record that the ranks train now, or generate with another snapshot, for a model.

        None is the base.
        """
        for window in self._windows(model):
            window.switches += 1

    def _windows(self, model: str | None) -> Iterator[_Window]:
        """The windows in which something of a model counts."""
        yield self._all
        if model in self._of:
            yield self._of[model]

    def _log(self, model: str, metrics: dict[str, float]) -> None:
        self.step += 1
        gradient = self._gradients.pop(model, _Gradient())
        own = {"loss": gradient.loss, "grad_norm": metrics["grad_norm"]}
        of_model = own | self._of[model].metrics()
        row = {
            **own,
            **self._all.metrics(),
            **{f"{name}/{model}": value for name, value in of_model.items()},
            "lr": metrics["lr"],
            "train_tokens": float(gradient.tokens),
        }
        self._all, self._of[model] = _Window(), _Window()
        self.telemetry.log(self.step, row)
