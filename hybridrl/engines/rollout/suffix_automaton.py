"""All contexts of a group of texts that grow: where a text went on before, and how often."""

from collections.abc import Iterable

ROOT = 0
"""The state of the empty context, at which every text begins."""

_COUNTED = 16  # contexts of a new token whose occurrences are counted, the longest first


class SuffixAutomaton:
    """A suffix automaton of several texts (Blumer et al., 1985), to which tokens may be added.

    A state stands for contexts (strings of tokens) that end at the same places of the texts. It
    knows the longest of them, and by each token that followed the state of the context that is
    longer by that token. The link of a state is that of its longest context that ends elsewhere,
    too. A text is known by the state of all its tokens. `extend` gives the next one: a few dozen
    operations a token, and at most two new states of some 400 bytes each.

    *Example.* Of the texts abcx, abcy and abcy the state of abc has x and y behind it, by counts of
    1 and 2. A text that ends in zabc continues as abc does: y.
    """

    def __init__(self) -> None:
        self._next: list[dict[int, int]] = [{}]
        self._link = [ROOT]
        self._longest = [0]  # tokens of the longest context
        self._counts = [0]  # occurrences

    def __len__(self) -> int:
        """The number of states."""
        return len(self._next)

    def extend(self, state: int, tokens: Iterable[int]) -> int:
        """The state of the text that is `state` after these further tokens."""
        for token in tokens:
            state = self._extend(state, token)
            counted = state
            for _ in range(_COUNTED):
                if counted == ROOT:
                    break
                self._counts[counted] += 1
                counted = self._link[counted]
        return state

    def _extend(self, state: int, token: int) -> int:
        known = self._next[state].get(token)
        if known is not None:  # another text was here
            return self._exact(state, token, known)
        new = self._add(self._longest[state] + 1, {}, ROOT, 0)
        before = state
        while token not in self._next[before]:
            self._next[before][token] = new
            if before == ROOT:
                return new
            before = self._link[before]
        self._link[new] = self._exact(before, token, self._next[before][token])
        return new

    def _exact(self, before: int, token: int, state: int) -> int:
        """The state of `before`'s longest context and the token, which `state` has among others."""
        longest = self._longest[before] + 1
        if self._longest[state] == longest:
            return state
        shorter = self._add(
            longest, dict(self._next[state]), self._link[state], self._counts[state]
        )
        self._link[state] = shorter
        while self._next[before].get(token) == state:
            self._next[before][token] = shorter
            if before == ROOT:
                break
            before = self._link[before]
        return shorter

    def _add(self, longest: int, following: dict[int, int], link: int, count: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._longest.append(longest)
        self._counts.append(count)
        return len(self._next) - 1

    def continuation(self, state: int, most: int, shortest: int, share: float) -> list[int]:
        """At most `most` tokens that followed the longest context of a text that went on before.

        Of several tokens the most frequent one is taken, of equally frequent ones the last to
        appear. It stops where that context has less than `shortest` tokens. It also stops where
        less than `share` of what followed the first context went on so.
        """
        tokens: list[int] = []
        likely, longest = 1.0, self._longest[state]
        while len(tokens) < most:
            while not self._next[state] and state != ROOT:
                state = self._link[state]
                longest = self._longest[state]
            following = self._next[state]
            if longest < shortest or not following:
                break
            counts = {token: self._counts[after] for token, after in following.items()}
            token = max(reversed(counts), key=counts.__getitem__)
            likely *= counts[token] / sum(counts.values())
            if likely < share:
                break
            tokens.append(token)
            state, longest = following[token], longest + 1
        return tokens
