"""Expected lengths of responses, and the instance of each sample.

Length-ranked, skewness-aware dispatch (StreamRL, arXiv 2504.15930): the long ones start first and
are spread, so that the last one ends soon. Nothing here depends on time, only on observations and
their order; so a resumed run dispatches as the uninterrupted one.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridrl.flow.sample import Sample, SampleId

_TELLING = 1.1  # the longest prediction over the shortest: below, they are as good as equal


@dataclass(frozen=True, slots=True)
class PromptKey:
    """A prompt as a ranker knows it: `item` names it in its dataset, `task` the dataset."""

    item: Hashable
    task: str
    prompt_ids: Sequence[int]


@dataclass(slots=True)
class _Mean:
    """A running mean that forgets: beyond `window` values the old ones fade."""

    count: float = 0.0
    mean: float = 0.0

    def add(self, value: float, window: float) -> None:
        self.count = min(self.count + 1, window)
        self.mean += (value - self.mean) / self.count

    def over(self, prior: float, weight: float) -> float:
        """The mean, drawn towards `prior` as if that were `weight` values."""
        return (self.count * self.mean + weight * prior) / (self.count + weight)


class LengthRanker:
    """Running means: of the prompt, drawn to that of its task, of all, and the prompt's length.

    Invariant: at most `max_items` prompts are remembered, those seen last.

    Example: a new prompt of 20 tokens, before anything was seen, is expected to take 20. After a
    hundred responses of 100 tokens in its task it is about 100. After eight responses of 10 tokens
    to the prompt itself it is (8 * 10 + 2 * 100) / 10 = 28.
    """

    _PRIOR = 2.0  # responses that the wider mean counts for
    _ITEM_WINDOW, _TASK_WINDOW = 32, 2048

    def __init__(self, max_items: int = 100_000) -> None:
        self.max_items = max_items
        self._items: dict[str, _Mean] = {}
        self._tasks: dict[str, _Mean] = {}
        self._all = _Mean()

    def predict(self, prompts: Sequence[PromptKey]) -> list[float]:
        """Expected response tokens of each prompt."""
        return list(map(self._expected, prompts))

    def _expected(self, key: PromptKey) -> float:
        """The mean of a prompt, drawn to the wider ones."""
        mean = self._all.over(max(1, len(key.prompt_ids)), self._PRIOR)
        for known in (self._tasks.get(key.task), self._items.get(repr(key.item))):
            mean = max(1.0, known.over(mean, self._PRIOR) if known else mean)
        return mean

    def observe(self, key: PromptKey, lengths: Sequence[int]) -> None:
        """Take in the lengths of a prompt's responses."""
        name = repr(key.item)
        item = self._items.pop(name, None) or _Mean()
        self._items[name] = item
        task = self._tasks.setdefault(key.task, _Mean())
        for length in lengths:
            item.add(length, self._ITEM_WINDOW)
            task.add(length, self._TASK_WINDOW)
            self._all.add(length, self._TASK_WINDOW)
        while len(self._items) > self.max_items:
            del self._items[next(iter(self._items))]

    def state_dict(self) -> dict[str, Any]:
        """The means, in plain JSON types."""
        return {
            "items": [[name, m.count, m.mean] for name, m in self._items.items()],
            "tasks": [[name, m.count, m.mean] for name, m in self._tasks.items()],
            "all": [self._all.count, self._all.mean],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; an older one may have a regression, with these means in it."""
        state = state.get("running", state)
        self._items = {name: _Mean(count, mean) for name, count, mean in state["items"]}
        self._tasks = {name: _Mean(count, mean) for name, count, mean in state["tasks"]}
        self._all = _Mean(*state["all"])


class Forecast:
    """Lengths of the last few steps, as a sample of those to come.

    Of conversations it also knows the seconds that each has waited for replies, in all.
    """

    def __init__(self, num_steps: int = 4) -> None:
        self._steps: deque[list[int]] = deque(maxlen=num_steps)
        self._waits: deque[list[float]] = deque(maxlen=num_steps)

    def add(self, lengths: Sequence[int], waits: Sequence[float] = ()) -> None:
        """Response tokens of a step's samples, which all ran to their end.

        With the `waits` of each they are in the order of their ends.
        """
        if lengths:
            assert len(waits) in (0, len(lengths)), (lengths, waits)
            self._steps.append([*lengths] if waits else sorted(lengths))
            self._waits.append([*waits] or [0.0] * len(lengths))

    @property
    def last(self) -> tuple[list[int], list[float]]:
        """The last step's lengths and waits, in the order of the samples' ends."""
        return list(self._steps[-1]), list(self._waits[-1])

    def sample(self, num: int) -> list[int]:
        """`num` lengths in the order of ends, evenly spaced over each step's; none before any.

        Mean over the steps, place by place: the last one is the mean of their longest, for which a
        step waits.
        """
        steps = self.steps(num)
        return [round(length) for length in np.mean(steps, axis=0).tolist()] if steps else []

    def steps(self, num: int) -> list[list[int]]:
        """Return `num` lengths of each step by their ends, evenly spaced, the oldest step first."""
        return [_spaced(step, num) for step in self._steps if num]

    def waits(self, num: int) -> list[list[float]]:
        """The waits of the samples of `steps`, in seconds."""
        return [_spaced(step, num) for step in self._waits if num]

    def state_dict(self) -> dict[str, Any]:
        """The lengths and waits, in plain JSON types."""
        return {"steps": [list(s) for s in self._steps], "waits": [list(s) for s in self._waits]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; an older one has no waits."""
        self._steps.clear()
        self._steps.extend(list(step) for step in state["steps"])
        self._waits.clear()
        self._waits.extend(state.get("waits") or [[0.0] * len(step) for step in self._steps])


def _spaced(values: Sequence[Any], num: int) -> list[Any]:
    """`num` of the values, evenly spaced, the last one among them."""
    places = np.arange(1, num + 1)
    spaced: list[Any] = np.asarray(values)[-(-places * len(values) // num) - 1].tolist()
    return spaced


@dataclass(kw_only=True)
class LengthModel:
    """Lengths, and waits, that a schedule learns over its steps.

    They change when and where, never which.

    `key_of` gives the key by which `ranker` knows a prompt. `longest_of_prompt` is the forecast of
    the longest response of each prompt, at whose end the prompt's samples are all there.
    `turns_of_prompt` is that of the most turns of a conversation of each prompt.
    """

    key_of: Callable[[Any], PromptKey]
    ranker: LengthRanker = field(default_factory=LengthRanker)
    forecast: Forecast = field(default_factory=Forecast)
    longest_of_prompt: Forecast = field(default_factory=Forecast)
    turns_of_prompt: Forecast = field(default_factory=Forecast)

    def predict(self, prompts: Iterable[Any]) -> list[float]:
        """The response tokens to expect of each prompt."""
        return self.ranker.predict([self.key_of(prompt) for prompt in prompts])

    def prompt_tokens(self, prompt: Any) -> int:
        """Tokens of a prompt."""
        return len(self.key_of(prompt).prompt_ids)

    def expected_turns(self, num_prompts: int) -> float:
        """The mean of the most turns of each of so many prompts."""
        turns = self.turns_of_prompt.sample(num_prompts)
        return sum(turns) / len(turns) if turns else 0.0

    def learn(
        self,
        prompts: Iterable[tuple[int, Any]],
        samples: Iterable[Sample],
        waited: Callable[[SampleId], float],
        token_s: Callable[[], float],
    ) -> None:
        """Learn from a round's samples: their lengths, seconds that they `waited`, and turns.

        What ends last is told by the seconds of a token, which are asked for where there are waits.
        """
        by_prompt: dict[int, list[tuple[int, float]]] = {}  # tokens, seconds of waits
        turns: dict[int, int] = {}
        for sample in samples:
            if "log_probs" in sample.tensors and sample.scalars["finish"] != "abort":
                position = sample.id.prompt
                by_prompt.setdefault(position, []).append((sample.model_tokens, waited(sample.id)))
                if "num_turns" in sample.scalars:
                    turns[position] = max(turns.get(position, 0), int(sample.number("num_turns")))
        every = [of for ofs in by_prompt.values() for of in ofs]
        per_token = token_s() if any(wait for _, wait in every) else 0.0

        def end(of: tuple[int, float]) -> tuple[float, int]:
            return of[1] + per_token * of[0], of[0]

        last = [max(of, key=end) for of in by_prompt.values()]
        for forecast, several in ((self.forecast, every), (self.longest_of_prompt, last)):
            in_order = sorted(several, key=end)
            forecast.add([tokens for tokens, _ in in_order], [wait for _, wait in in_order])
        self.turns_of_prompt.add([*turns.values()])
        for position, prompt in prompts:
            if position in by_prompt:
                lengths = [tokens for tokens, _ in by_prompt[position]]
                self.ranker.observe(self.key_of(prompt), lengths)

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, in plain JSON types."""
        return {name: getattr(self, name).state_dict() for name in _LEARNED}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`; one of another schedule or of earlier lacks some."""
        for name in _LEARNED:
            if name in state:
                getattr(self, name).load_state_dict(state[name])


_LEARNED = ("ranker", "forecast", "longest_of_prompt", "turns_of_prompt")


def leveled(predicted: Sequence[float]) -> list[float]:
    """The predictions, or their mean for each where they differ too little to tell what is longer.

    Dealt in the order of such differences, samples would be shuffled.
    """
    if not predicted or max(predicted) > _TELLING * min(predicted):
        return list(predicted)
    return [sum(predicted) / len(predicted)] * len(predicted)


def dispatch(
    predicted: Sequence[float],
    num_instances: int,
    room: int | Sequence[int],
    loads: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[int]]:
    """Deal samples, or groups of them, to instances: longest first, to the one with fewest tokens.

    `predicted` are tokens of each; `sizes` how many samples it is (1 each). `room` is how many
    samples an instance takes (one number, or one each); `loads` tokens that the instances have in
    flight already. Gives the indices for each instance in order of dispatch, and those that fit
    nowhere, longest first.

    Longest-processing-time-first: unless room runs out, the fullest instance has at most
    4/3 - 1/(3m) of the least that is possible on m instances (Graham 1969). Ties go by index.

    Example: [5, 9, 4, 4] on two instances gives [[1, 3], [0, 2]]: 9 + 4 and 5 + 4 tokens.
    """
    rooms = [room] * num_instances if isinstance(room, int) else list(room)
    tokens = list(loads or [0.0] * num_instances)
    dealt: list[list[int]] = [[] for _ in range(num_instances)]
    left = []
    for index in sorted(range(len(predicted)), key=lambda i: (-predicted[i], i)):
        size = sizes[index] if sizes else 1
        able = [i for i in range(num_instances) if rooms[i] >= size]
        if not able:
            left.append(index)
            continue
        instance = min(able, key=lambda i: (tokens[i], i))
        dealt[instance].append(index)
        tokens[instance] += predicted[index]
        rooms[instance] -= size
    return dealt, left


def dispatch_groups(
    groups: Sequence[Sequence[tuple[SampleId, float]]], room: Sequence[int], loads: Sequence[float]
) -> tuple[list[list[SampleId]], list[SampleId]]:
    """Deal groups of samples, each with its predicted tokens; see `dispatch`.

    Groups stay whole where there are enough of them. One that does not fit as a whole is dealt one
    by one. Gives the samples of each instance, and those left over.
    """
    rooms, loads = list(room), list(loads)
    units = list(groups)
    if len(units) < len(rooms):
        units = [[sample] for group in groups for sample in group]
    dealt: list[list[SampleId]] = [[] for _ in rooms]
    for whole in (True, False):
        units = units if whole else [[sample] for unit in units for sample in unit]
        tokens = leveled([sum(tokens for _, tokens in unit) for unit in units])
        sizes = [len(unit) for unit in units]
        chosen, left = dispatch(tokens, len(rooms), rooms, loads, sizes)
        for i, mine in enumerate(chosen):
            samples = [sample for unit in mine for sample in units[unit]]
            dealt[i] += [id for id, _ in samples]
            loads[i] += sum(tokens for _, tokens in samples)
            rooms[i] -= len(samples)
        units = [units[i] for i in left]
    return dealt, [id for unit in units for id, _ in unit]
