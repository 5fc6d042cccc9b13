"""What clients ask of their models: gradients, steps, checkpoints, snapshots."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hybridrl.algorithms.tinker_losses import TinkerLoss, tinker_loss
from hybridrl.checkpoint.distributed import Progress
from hybridrl.engines.train.optimizer_steps import AdamWSettings
from hybridrl.serving.checkpoints import CheckpointFiles
from hybridrl.serving.ranks import ServingRanks
from hybridrl.serving.requests import (
    CheckpointPath,
    ClientAnswer,
    Completed,
    CreateModel,
    Datum,
    Float32,
    ForwardBackward,
    LoadModel,
    LossOutputs,
    OptimStep,
    Refused,
    Save,
    Saved,
    ServedModel,
    Stepped,
    Unload,
)
from hybridrl.serving.snapshots import Snapshots
from hybridrl.workers.serving import GradientCall, ServingWorker

logger = logging.getLogger(__name__)

SCORING = "cross_entropy"
"""The loss whose forward pass scores a snapshot: any would do."""
ModelRequest = CreateModel | ForwardBackward | OptimStep | Save | LoadModel | Unload


@dataclass(slots=True)
class ClientModel:
    """A model that the ranks have: its optimizer steps, and whether it has a gradient."""

    steps: int = 0
    has_gradient: bool = False


class ClientTraining:
    """Clients' models by name, on ranks that are in TRAIN."""

    def __init__(
        self,
        ranks: ServingRanks,
        served: ServedModel,
        files: CheckpointFiles,
        snapshots: Snapshots,
    ) -> None:
        self.ranks, self.served, self.files, self.snapshots = ranks, served, files, snapshots
        self.models: dict[str, ClientModel] = {}

    def run(self, request: ModelRequest) -> ClientAnswer:
        """Run a request to its end. Raises Refused where it is the client's fault."""
        match request:
            case CreateModel():
                return self._create(request)
            case ForwardBackward():
                return self._forward_backward(request)
            case OptimStep():
                return self._step(request)
            case Save():
                return self._save(request)
            case LoadModel():
                self._load(request.model, request.path, request.optimizer)
            case Unload():
                self._model(request.model)
                self._unload(request.model)
        return Completed()

    def _model(self, name: str) -> ClientModel:
        if name not in self.models:
            raise Refused(f"{name}: there is no such model, or it has been unloaded")
        return self.models[name]

    def _create(self, request: CreateModel) -> Completed:
        name = request.model
        if name in self.models:
            raise Refused(f"{name}: there is a model of that name")
        if not self.served.lora_rank and self.models:
            other = next(iter(self.models))
            raise Refused(f"actor.lora.rank=0 serves all weights of one model, now {other}")
        if len(self.models) == self.served.most_models:
            raise Refused(
                f"{name}: a node's memory holds {self.served.most_models} models at once beside"
                f" serve.snapshots={self.snapshots.most}; a client that ends frees its own, or"
                " one that is silent for serve.idle_s"
            )
        if request.source is not None:
            self.check_source(request.source, request.optimizer)
        self.ranks.ask(ServingWorker.create_model, name, request.seed)
        self.models[name] = ClientModel()
        if request.source is not None:
            try:
                self._load(name, request.source, request.optimizer)
            except Refused:
                self._unload(name)
                raise
        return Completed()

    def _unload(self, name: str) -> None:
        self.ranks.ask(ServingWorker.drop_model, name)
        del self.models[name]
        self.snapshots.unload(name)

    def _forward_backward(self, request: ForwardBackward) -> LossOutputs:
        model = self._model(request.model)
        call = GradientCall(request.model, _checked_loss(request), request.backward)
        log_probs, metrics = self.ranks.add_gradient(call, request.data)
        model.has_gradient |= request.backward
        return LossOutputs(log_probs, {"loss:sum": metrics["loss"]})

    def score(self, version: int, data: Sequence[Datum]) -> list[Float32]:
        """Log-probabilities of each datum's targets, in their shape, with a snapshot's weights."""
        call = GradientCall(version, tinker_loss(SCORING, {}, _num_targets(data)), backward=False)
        return self.ranks.add_gradient(call, data)[0]

    def _step(self, request: OptimStep) -> Stepped:
        model = self._model(request.model)
        if not model.has_gradient:
            raise Refused("optim_step: there is no gradient since the last one")
        betas = request.beta1, request.beta2
        rest = request.eps, request.weight_decay, request.clip
        metrics = self.ranks.ask(
            ServingWorker.step_model, request.model, AdamWSettings(request.lr, betas, *rest)
        )
        model.has_gradient = False
        model.steps += not metrics["bad_step"]
        return Stepped(metrics)

    def _save(self, request: Save) -> Saved:
        model = self._model(request.model)
        path = CheckpointPath.parse(f"tinker://{request.model}/{request.kind}/{request.name}")
        samples = request.kind == "sampler_weights"
        if request.files:
            self._write(request, path, model.steps)
            self.snapshots.detach(str(path))  # which may have been read from older files
        if samples:
            self.drop_snapshots(coming=1)
            folder = self.files.folder(path) if request.files else None
            snapshot = self.snapshots.add(str(path), folder, here=True)
            self.ranks.ask(ServingWorker.take_snapshot, snapshot.version, request.model)
        return Saved(str(path))

    def drop_snapshots(self, coming: int = 0) -> None:
        """Have the ranks forget the snapshots that are too many once `coming` ones are there."""
        for snapshot in list(self.snapshots.dropped(coming)):
            logger.info("the snapshot %s is dropped from memory", snapshot.path or "of the base")
            self.ranks.ask(ServingWorker.drop_snapshot, snapshot.version)

    def _write(self, request: Save, path: CheckpointPath, steps: int) -> None:
        served, trains = self.served, request.kind == "weights"
        record = self.files.record(
            served.name, served.trained, served.lora_rank, steps, request.ttl_s
        )
        with self.files.writing(path, record, request.overwrite) as folder:
            error = self.ranks.ask(ServingWorker.save_model, request.model, str(folder), trains)
            if error:
                raise Refused(f"{path} cannot be written: {error}")

    def check_source(self, text: str, optimizer: bool = False) -> tuple[CheckpointPath, int]:
        """The path of a checkpoint that this server's models can have, and its steps.

        Raises Refused for one of another base or of other adapters, and for one that is not there.
        """
        path, served = CheckpointPath.parse(text), self.served
        record = self.files.read(path)
        if (record.base, record.trained) != (served.name, served.trained):
            own, wanted = f"{record.trained} of {record.base}", f"{served.trained} of {served.name}"
            raise Refused(f"{path} has {own}; this server trains {wanted}")
        if optimizer and path.kind != "weights":
            raise Refused(f"{path} has no optimizer's state; save_state writes one")
        return path, record.steps

    def _load(self, name: str, text: str, optimizer: bool) -> None:
        model = self._model(name)
        path, steps = self.check_source(text, optimizer)
        progress = Progress(steps, steps) if optimizer else None
        folder = str(self.files.folder(path))
        model.has_gradient = False
        if error := self.ranks.ask(ServingWorker.load_model, name, folder, progress):
            raise Refused(f"{path} cannot be read: {error}")
        model.steps = steps if optimizer else 0


def _checked_loss(request: ForwardBackward) -> TinkerLoss:
    """The loss of a request; raises Refused for one that there is not, or that lacks inputs."""
    try:
        loss = tinker_loss(request.loss, request.settings, _num_targets(request.data))
    except ValueError as error:
        raise Refused(str(error)) from None
    for number, datum in enumerate(request.data):
        _check_inputs(datum, f"data[{number}]", request.loss, loss)
    return loss


def _num_targets(data: Sequence[Datum]) -> int:
    """The most targets of a position; 0 where all are the next input tokens."""
    widest = max((_width(datum) for datum in data), default=0)
    return 0 if all(map(_is_shifted, data)) else widest


def _width(datum: Datum) -> int:
    return datum.targets.shape[1] if datum.targets.ndim == 2 else 1


def _is_shifted(datum: Datum) -> bool:
    """Whether each target is the input token behind it."""
    return datum.targets.ndim == 1 and bool((datum.targets[:-1] == datum.tokens[1:]).all())


def _check_inputs(datum: Datum, name: str, loss: str, wanted: TinkerLoss) -> None:
    for key in wanted.inputs:
        if key not in datum.inputs:
            raise Refused(f"{name}: loss_fn={loss} needs loss_fn_inputs.{key}")
        if datum.inputs[key].shape != datum.targets.shape:
            shape, own = list(datum.targets.shape), list(datum.inputs[key].shape)
            raise Refused(f"{name}: {key} is {own}, wanted {shape}, as target_tokens")
    if unknown := sorted(datum.inputs.keys() - {*wanted.inputs}):
        known = ", ".join(wanted.inputs)
        raise Refused(f"{name}: loss_fn_inputs.{unknown[0]} is none of {loss}'s: {known}")
