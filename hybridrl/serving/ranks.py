"""The ranks of a server: what they are asked in training, and on each instance in generation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from hybridrl.driver.worker_group import WorkerGroup
from hybridrl.pipelines.balance import balance
from hybridrl.serving.requests import Datum, Float32
from hybridrl.workers.base_worker import Reply
from hybridrl.workers.rank_calls import RankCalls, Reference
from hybridrl.workers.serving import (
    DrawnResponse,
    DrawnSample,
    GradientCall,
    ScoredTokens,
    ServingWorker,
    TokenScores,
)

Params = ParamSpec("Params")
Value = TypeVar("Value")


class ServingRanks(WorkerGroup):
    """The ranks of a `WorkerGroup` that serve (`workers.serving`); every call waits for its end."""

    def ask(
        self,
        method: Callable[Concatenate[ServingWorker, Params], Reply[Value]],
        *args: Params.args,
        **kwargs: Params.kwargs,
    ) -> Value:
        """Call a method of all ranks; the first one's answer."""
        return self.gather(self.home.calls.same(method, *args, **kwargs))[0]

    def add_gradient(
        self, call: GradientCall, data: Sequence[Datum]
    ) -> tuple[list[Float32], dict[str, float]]:
        """Deal data to the ranks by their lengths; log-probabilities of each datum, and metrics."""
        dealt = balance([len(datum.tokens) for datum in data], self.size)
        shares = [tuple(data[i] for i in indices) for indices in dealt]
        calls = self.home.calls.per_rank(ServingWorker.add_gradient, [call] * self.size, shares)
        answers = self.gather(calls)
        log_probs: dict[int, Float32] = {}
        for indices, (own, _) in zip(dealt, answers, strict=True):
            log_probs |= zip(indices, own, strict=True)
        return [log_probs[i] for i in range(len(data))], answers[0][1]

    def draw(
        self, new: Mapping[int, Sequence[DrawnSample]], num_decode_steps: int
    ) -> list[DrawnResponse]:
        """Begin samples by instance, and decode on all of them; the responses that have ended."""

        def begin(calls: RankCalls, instance: int) -> list[Reference[list[DrawnResponse]]]:
            own = tuple(new.get(instance, ()))
            return calls.same(ServingWorker.draw, own, num_decode_steps)

        answers = self._on_instances(range(len(self.instances)), begin)
        return [one for answer in answers.values() for one in answer]

    def score(self, wanted: Mapping[int, Sequence[ScoredTokens]]) -> dict[int, list[TokenScores]]:
        """Score sequences by instance."""

        def begin(calls: RankCalls, instance: int) -> list[Reference[list[TokenScores]]]:
            return calls.same(ServingWorker.score_tokens, tuple(wanted[instance]))

        return self._on_instances([i for i, own in wanted.items() if own], begin)

    def _on_instances(
        self,
        instances: Sequence[int],
        begin: Callable[[RankCalls, int], list[Reference[Value]]],
    ) -> dict[int, Value]:
        """Begin a call on every rank of these instances; the answer of each one's first rank."""
        calls = {
            begin(self._ranks[rank], instance)[0]: rank
            for instance in instances
            for rank in self.places[instance]
        }
        answers = dict(zip(calls.values(), self._gather_living(calls), strict=True))
        return {instance: answers[self.places[instance][0]] for instance in instances}
