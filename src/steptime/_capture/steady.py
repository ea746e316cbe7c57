"""`SteadyLoop`: which iteration of a training loop repeats, from what was called between the marks that its optimisers leave.

A part is what was called from the end of one optimiser's step to the end of the next. An iteration is the fewest parts in a row
that repeat: one for an ordinary loop however many backward passes it sums up, two for a generator and a discriminator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

# Parts after which less has to agree for an iteration to be taken: batches of varying length never repeat exactly.
_WITHOUT_SHAPES, _WITHOUT_CALLS = 5, 10
_ALTERNATING = 4  # parts after which it need not be the one before that agrees
_LONGEST_PERIOD = 16
_IN_VAIN = 20  # parts to wait for an optimiser that has never stepped


@dataclass(frozen=True, slots=True)
class LoopPart:
    """What a loop called between two marks: digests of its calls, and whose step ended it."""

    exact: int  # of calls with the shapes of their tensors
    names: int  # of calls alone
    calls: int
    optimizer: int


@dataclass
class SteadyLoop:
    """The parts so far, oldest first; the one before the first mark, where models are made, is left out."""

    early: bool = False  # observe before anything can be compared
    parts: list[LoopPart] = field(default_factory=list)

    def length(self, *, waiting: bool = False) -> int:
        """How many parts from here on are worth observing; 0 for none yet. `waiting`: an optimiser has not stepped so far."""
        count = len(self.parts)
        if not (count or self.early) or (waiting and count < _IN_VAIN):
            return 0
        distinct = len({part.optimizer for part in self.parts})
        if distinct <= 1:
            return 1
        return next((each for each in range(distinct, _LONGEST_PERIOD + 1) if self._repeats(each)), 0)

    def settled(self, length: int) -> bool:
        """Whether the last parts, so many, are an iteration like the one before, as far as can be asked by now."""
        again = length == 1 and len(self.parts) >= _ALTERNATING and self._usual() == self.parts[-1]
        return again or self._repeats(length) or len(self.parts) >= _WITHOUT_CALLS * length

    def _usual(self) -> LoopPart | None:
        """Where iterations alternate, as with a line logged every other time: of those that came again, the one with least."""
        counts = Counter(self.parts)
        return min((part for part, count in counts.items() if count > 1), key=lambda part: part.calls, default=None)

    def difference(self, length: int) -> str:
        """In what the last iteration differs from those before; empty where one was the same."""
        last, before = self.parts[-length:], self.parts[-2 * length : -length]
        if length == 1 and self.parts.count(last[0]) > 1:
            return ""
        if [part.exact for part in last] == [part.exact for part in before]:
            return ""
        return "shapes" if [part.names for part in last] == [part.names for part in before] else "calls"

    def others(self, length: int) -> int:
        """Of the parts so far, how many called something else than those of the last iteration."""
        usual = {part.names for part in self.parts[-length:]}
        return sum(part.names not in usual for part in self.parts)

    def _repeats(self, length: int) -> bool:
        if len(self.parts) < 2 * length:
            return False
        keys = [self._key(part) for part in self.parts[-2 * length :]]
        every = {part.optimizer for part in self.parts}
        return keys[:length] == keys[length:] and {part.optimizer for part in self.parts[-length:]} == every

    def _key(self, part: LoopPart) -> Sequence[int]:
        if len(self.parts) < _WITHOUT_SHAPES:
            return (part.exact, part.optimizer)
        return (part.names, part.optimizer) if len(self.parts) < _WITHOUT_CALLS else (part.optimizer,)
