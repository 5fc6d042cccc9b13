"""Events of an executor as lines of the log."""

from hybridrl.flow.executor import (
    Advanced,
    Compared,
    Computed,
    EarlyTrained,
    Event,
    Prepared,
    Replied,
    SamplesRead,
    TargetsLoaded,
    UpdateDone,
    UpdateRefused,
    WeightsPushed,
    WeightsReady,
    WorkerDied,
)


def described(event: Event) -> str:
    """An event in a line of the log."""
    match event:
        case Advanced():
            return f"a call of instance {event.instance}, {len(event.finished)} samples finished"
        case Replied():
            return f"environments answered {len(event.replies)} turns"
        case Computed():
            return f"stage {event.stage} on {len(event.ids)} samples"
        case Compared():
            return "the engines' log-probabilities are compared"
        case SamplesRead():
            return f"stage {event.stage} has read {len(event.ids)} samples"
        case UpdateDone():
            return f"stage {event.stage}"
        case UpdateRefused():
            return f"stage {event.stage} before it began: samples of it have died"
        case TargetsLoaded():
            return "targets were loaded"
        case EarlyTrained():
            return f"{len(event.ids)} samples of stage {event.stage} on instance {event.instance}"
        case WeightsReady():
            return f"all instances have weights {event.version}"
        case WeightsPushed():
            return f"weights {event.version} can be loaded"
        case Prepared():
            return f"{len(event.places)} instances have changed to {event.phase.value}"
        case WorkerDied():
            return f"generation instance {event.instance}, whose ranks died"
