"""A generation instance that holds no model: rows of known lengths, and the work that they are.

The planner gives it virtual time (`simulate.py`), an emulated rank wall time (`workers/`).
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hybridrl.costs.instance import UNLIMITED, Costs
from hybridrl.flow.conversations import ModeledConversation, ModeledTurn
from hybridrl.flow.executor import (
    ENOUGH_TURNS,
    Answer,
    Command,
    CopyTokens,
    EpisodeReply,
    LoadWeights,
    Park,
    Parked,
    Resume,
    Submit,
)
from hybridrl.flow.instance_work import Work
from hybridrl.flow.sample import NO_VERSION, SampleId, TokenSpan


@dataclass(slots=True)
class ModeledRow:
    """A response: `left` tokens to decode after `prefill` or `restore` tokens.

    `ahead` is what its passes have made beyond whole tokens, below 1. Of a guess that may be right
    only the mean is known.
    """

    id: SampleId
    prompt: int
    left: int
    finish: str = "stop"
    prefill: int = 0
    restore: int = 0
    spans: list[TokenSpan] = field(default_factory=list)
    ahead: float = 0.0
    turns: tuple[ModeledTurn, ...] = ()
    """Turns of a conversation: the present one, of which `left` tokens are to come, and more."""
    num_turns: int = 0
    scalars: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def waits(self) -> bool:
        """Whether it is between two turns of a conversation."""
        return bool(self.turns) and not self.left

    @property
    def num_generated(self) -> int:
        """Tokens of the response so far."""
        return self.spans[-1].stop if self.spans else 0

    @property
    def tokens(self) -> int:
        """Tokens of prompt and response so far."""
        return self.prompt + self.num_generated

    def passes(self, tokens: int, each: float) -> int:
        """Passes of `each` tokens on average until so many more tokens are there."""
        return max(1, math.ceil((tokens - self.ahead) / each - 1e-9))

    def run(self, passes: int, each: float, most: int) -> int:
        """The tokens of so many passes of `each` on average, at most `most`; not added yet."""
        total = self.ahead + passes * each
        tokens = min(most, int(total + 1e-9))
        self.ahead = total - tokens if tokens < most else 0.0
        return tokens

    def decode(self, steps: int, version: int) -> None:
        """Add `steps` tokens, by weights of `version`."""
        start = generated = self.num_generated
        if self.spans and self.spans[-1].version == version:
            start = self.spans.pop().start
        self.spans.append(TokenSpan(start, generated + steps, version))
        self.left -= steps

    def answer(self, reply: EpisodeReply) -> None:
        """Go on after a reply to its turn, or end with it."""
        if reply.tokens is None:
            self.turns, self.finish = (), reply.finish
            self.scalars |= reply.scalars
            return
        start = self.num_generated
        self.spans.append(TokenSpan(start, start + len(reply.tokens), NO_VERSION, trained=False))
        self.prefill += len(reply.tokens)
        self.turns = self.turns[1:]
        self.left = self.turns[0].tokens


class _Tally:
    """The work of one call, added up."""

    def __init__(self) -> None:
        self.steps = self.prefill = self.admitted = self.accepted = 0
        self.kv = self.kv_calls = 0
        self.rows = self.cached = self.drafted = 0.0  # means, where rows guess ahead

    def work(self, costs: Costs) -> Work:
        """The call's work, and its seconds; of keys and values only one end of two counts."""
        kv = (costs.kv_token_s * self.kv + costs.kv_call_s * self.kv_calls) / 2
        decode = self.steps * costs.step_s + self.rows * costs.row_s
        cached = self.cached * costs.cached_token_s
        begun = self.prefill * costs.prefill_token_s + self.admitted * costs.admit_s
        return Work(
            costs.call_s + decode + cached + begun + kv,
            self.steps,
            round(self.rows),
            round(self.cached),
            self.prefill,
            self.kv,
            kv,
            self.admitted,
            drafted=round(self.drafted),
            accepted=self.accepted,
            refused=self._refused(costs),
        )

    def _refused(self, costs: Costs) -> int:
        """Drafts with a wrong guess, so that the right ones have the share that the costs say."""
        accept = 1.0 if costs.drafting is None else costs.drafting.accept
        return round(self.accepted * (1 / accept - 1) if accept else self.drafted)


@dataclass(frozen=True, slots=True)
class Advance:
    """The outcome of a bounded call: whole responses, parked ones, the work.

    Of `turns` a turn has ended, so that they wait. `copies` are those of `CopyTokens`.
    """

    finished: tuple[ModeledRow, ...]
    parked: tuple[Parked, ...]
    work: Work
    turns: tuple[ModeledRow, ...] = ()
    copies: tuple[Parked, ...] = ()


class ModeledInstance:
    """Rows that decode, at most `max_running`, and rows that wait for room, or for a reply.

    `length_of` returns the response tokens of a sample, `prompt_tokens_of` those of a prompt, by
    position. The state of `Parked` and `Resume` is a dict by id of a row, and whether its keys and
    values are with it. With `conversation_of` a response has turns, and is held after each of them.
    It takes no room meanwhile, and goes on before those that wait for room. A call ends early where
    enough turns have ended, as a rank's does.

    Where the costs have `drafting`, a pass makes the mean number of tokens of a row. With
    `counts_tokens` a row makes at most a call's steps of tokens, as in the engine (`Speculation`).
    Then nothing is guessed in calls that begin with samples that wait.

    Invariant: a sample's response has its known length, whether it was parked or moved or not.

    Example: samples of 3 and 5 tokens, in calls of 4 steps. The first call finishes the first of
    them, the second call the other one after a step.
    """

    def __init__(
        self,
        costs: Costs,
        length_of: Callable[[SampleId], int],
        prompt_tokens_of: Callable[[int], int],
        max_running: int,
        counts_tokens: bool = False,
        conversation_of: Callable[[SampleId], ModeledConversation] | None = None,
    ) -> None:
        self.conversation_of = conversation_of
        self.costs, self.max_running, self.counts_tokens = costs, max_running, counts_tokens
        self.length_of, self.prompt_tokens_of = length_of, prompt_tokens_of
        self.running: dict[SampleId, ModeledRow] = {}
        self.waiting: deque[ModeledRow] = deque()
        self.held: dict[SampleId, ModeledRow] = {}

    @property
    def unfinished(self) -> int:
        """Rows that have not ended, without those that are held."""
        return len(self.running) + len(self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether it has no row at all."""
        return not self.unfinished and not self.held

    def advance(
        self,
        commands: Sequence[Command],
        num_decode_steps: int,
        version: int,
        enough_turns: int = ENOUGH_TURNS,
    ) -> Advance:
        """Obey the commands, then decode until the steps are done or no row remains.

        `version` is that of the weights. It ends earlier where a turn has ended for one in
        `enough_turns` of the rows that are left.
        """
        tally = _Tally()
        finished: list[ModeledRow] = []
        parked: list[Parked] = []
        for command in commands:
            match command:
                case LoadWeights(keeps_kv=keeps_kv):
                    self._load(keeps_kv)
                case Submit():
                    self._submit(command)
                case Park():
                    parked.append(self._park(command, version, tally))
                case Resume():
                    self._resume(command, version)
                case Answer(replies=replies):
                    finished += self._answer(replies)
        drafts, ends = self.costs.drafting is not None, {}
        if drafts and self.counts_tokens:
            self._admit(tally)
            drafts = not self.waiting
            if drafts:
                ends = {id: r.num_generated + num_decode_steps for id, r in self.running.items()}
        while tally.steps < num_decode_steps and self.unfinished:
            self._admit(tally)
            most = num_decode_steps - tally.steps
            if not (drafts or self.waiting or self.conversation_of):
                finished += self._decode_each(most, version, tally)
                break
            rows = {
                id: min(row.left, ends.get(id, UNLIMITED) - row.num_generated)
                for id, row in self.running.items()
            }
            rows = {id: most for id, most in rows.items() if most}
            if not rows:  # all have made the call's tokens
                break
            finished += self._decode(rows, drafts, most, version, tally)
            num_ended = sum(row.waits for row in finished)
            if num_ended and enough_turns * num_ended >= self.unfinished:
                break
        turns = tuple(row for row in finished if row.waits)
        self.held |= {row.id: row for row in turns}
        ended = tuple(row for row in finished if not row.waits)
        copies = (
            (self._copies(version),) if any(isinstance(c, CopyTokens) for c in commands) else ()
        )
        return Advance(ended, tuple(parked), tally.work(self.costs), turns, copies)

    def _load(self, keeps_kv: bool) -> None:
        """Other weights: without `keeps_kv` all rows compute their keys and values again."""
        if keeps_kv:
            return
        for row in [*self.running.values(), *self.held.values()]:
            row.prefill = row.tokens
        for row in self.waiting:
            row.prefill, row.restore = row.prefill + row.restore, 0
        self.waiting.extendleft(reversed(self.running.values()))
        self.running.clear()

    def _submit(self, command: Submit) -> None:
        most = command.sampling.max_new_tokens
        for i, id in enumerate(command.ids):
            length, prompt = self.length_of(id), self.prompt_tokens_of(id.prompt)
            finish = "length" if length > most else "stop"
            # Samples of one prompt share its cache.
            prefill = 0 if i else prompt
            row = ModeledRow(id, prompt, max(1, min(length, most)), finish, prefill=prefill)
            if self.conversation_of is not None:
                row.turns, row.finish = self.conversation_of(id).cut_at(most)
                row.left = row.turns[0].tokens
            self.waiting.append(row)

    def _resume(self, command: Resume, version: int) -> None:
        parked = command.parked
        usable = command.stale_kv or parked.version == version
        usable &= not command.recompute
        for id in command.ids:
            row, with_kv = parked.state[id]
            row.restore, row.prefill = (row.tokens, 0) if with_kv and usable else (0, row.tokens)
            if row.waits:
                self.held[id] = row
            else:
                self.waiting.append(row)

    def _answer(self, replies: Sequence[EpisodeReply]) -> list[ModeledRow]:
        """Give waiting rows their replies, and return the rows that have ended.

        The others come before rows that wait for room.
        """
        rows = [self.held.pop(reply.id) for reply in replies]
        for row, reply in zip(rows, replies, strict=True):
            row.answer(reply)
        self.waiting.extendleft(reversed([row for row in rows if row.turns]))
        return [row for row in rows if not row.turns]

    def _park(self, command: Park, version: int, tally: _Tally) -> Parked:
        state: dict[SampleId, tuple[ModeledRow, bool]] = {}
        for id in command.ids:
            if id in self.running:
                row = self.running.pop(id)
                state[id] = (row, command.with_kv)
                tally.kv += row.tokens if command.with_kv else 0
            elif id in self.held:
                row = self.held.pop(id)
                with_kv = command.with_kv and not row.prefill  # else it has none yet
                state[id] = (row, with_kv)
                tally.kv += row.tokens if with_kv else 0
            else:
                for row in [row for row in self.waiting if row.id == id]:
                    self.waiting.remove(row)
                    state[id] = (row, False)
        tally.kv_calls += any(kv for _, kv in state.values())
        tokens = tuple(row.tokens for row, _ in state.values())
        return Parked(tuple(state), tokens, version, state, command.width)

    def _copies(self, version: int) -> Parked:
        """Copies of all rows, as if they were parked without keys and values."""
        rows = [*self.running.values(), *self.held.values(), *self.waiting]
        state = {row.id: (replace(row, spans=[*row.spans]), False) for row in rows}
        return Parked(tuple(state), tuple(row.tokens for row in rows), version, state)

    def _admit(self, tally: _Tally) -> None:
        restored = False
        while self.waiting and len(self.running) < self.max_running:
            row = self.waiting.popleft()
            tally.admitted += 1
            tally.prefill += row.prefill
            tally.kv += row.restore
            restored |= row.restore > 0
            row.prefill = row.restore = 0
            self.running[row.id] = row
        tally.kv_calls += restored

    def _decode_each(self, most: int, version: int, tally: _Tally) -> list[ModeledRow]:
        """Decode until each row has ended, at most `most` steps, where nothing else happens.

        The same as `_decode` again and again, without a look at all rows at each end.
        """
        ended, longest = list[tuple[int, ModeledRow]](), 0
        for row in self.running.values():
            steps = min(most, row.left)
            tally.rows += steps
            tally.cached += steps * row.tokens + steps * (steps - 1) / 2
            row.decode(steps, version)
            if not row.left:
                row.num_turns += 1
                ended.append((steps, row))
            longest = max(longest, steps)
        tally.steps += longest
        ended.sort(key=lambda pair: pair[0])
        return [self.running.pop(row.id) for _, row in ended]

    def _decode(
        self, rooms: dict[SampleId, int], drafts: bool, most: int, version: int, tally: _Tally
    ) -> list[ModeledRow]:
        """Decode until a row has all of its tokens in `rooms`, at most `most` steps.

        Returns the rows that have ended a turn, or all.
        """
        rows, num = [self.running[id] for id in rooms], len(rooms)
        drafted, right = 0.0, 0.0
        if drafts:
            held = sum(row.tokens for row in rows) / num
            drafted, right = map(float, self.costs.drafts(num, held))
        each = 1 + right
        steps = min(row.passes(room, each) for row, room in zip(rows, rooms.values(), strict=True))
        steps = min(most, steps)
        tally.steps += steps
        tally.rows += steps * num * (1 + drafted)
        tally.drafted += steps * num * drafted
        ended = []
        for row, room in zip(rows, rooms.values(), strict=True):
            before, tokens = row.tokens, row.run(steps, each, room)
            tally.cached += steps * before + tokens * (steps - 1) / 2
            tally.accepted += tokens - steps
            row.decode(tokens, version)
            if not row.left:
                row.num_turns += 1
                ended.append(self.running.pop(row.id))
        return ended
