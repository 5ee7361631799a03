"""Whether a lending pays: waits with it and waits without it, tried in turn and compared by their pace.

    at first           off (on) off on  off on  off on ──► compare    the first lending warms up and is not counted
    on was faster      on on on ... on  off off ──► compare           it is worth it: checked now and then
    off was faster     off off ... off  on on ──► compare             it is not: tried again now and then

The pace of a wait is the tokens that all engines sampled in it over its seconds, with bringing the lent engine up and
taking the device back. So whatever the lending costs is in it: also what nobody could add up, that engines of one host
take each other's cores, caches and interpreter. A comparison ends early where the paces are far apart; each that ends
as the one before doubles the waits until the next, so that what trials cost becomes a small share of a long run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

NUM_PAIRS = 3
"""Waits of each kind in the first comparison, in turn: a drift of the work is in both."""
DECISIVE = 1.5
"""Times one pace is of the other where a comparison needs no further wait."""
NUM_CHECKS = 2
"""Waits of the other kind in a later one."""
FIRST_HOLD = 16
"""Waits until the first comparison is repeated."""
MAX_HOLD = {True: 64, False: 256}
"""Most waits between two comparisons, while it is lent and while it is not: a retry can lose, a check gains less."""
NUM_RECENT = 6
"""Waits of a kind that count."""
NUM_SUSPECT = 3
"""Waits with a lending that are slower than those without before that is checked at once."""
LATE = 1.5
"""Times the longest of the recent waits without it after which a lending on trial is ended: the most it can cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a comparison found."""

    pays: bool
    lent_tokens_per_s: float
    alone_tokens_per_s: float
    num_lent: int
    """Waits compared."""
    num_alone: int
    num_waits_held: int
    """Waits until the next comparison."""


class LendingTrial:
    """Which kind the next wait is, by what was measured so far. Takes measurements only: it reads no clock."""

    def __init__(self) -> None:
        self.verdict: Verdict | None = None
        """Of the last comparison; None before the first."""
        self._next = deque([False, True] * (1 + NUM_PAIRS))
        self._is_warm = False
        """It was lent before: graphs were recorded and pages touched."""
        self._hold = FIRST_HOLD
        self._waits: dict[bool, deque[tuple[int, float]]] = {
            kind: deque(maxlen=NUM_RECENT) for kind in (True, False)
        }
        """Tokens and seconds of the recent waits, with a lending and without."""

    @property
    def lends_next(self) -> bool:
        return self._next[0]

    @property
    def longest_s(self) -> float | None:
        """Seconds after which a lending is ended although the trainer still waits; None before there is a measure."""
        alone = [seconds for _, seconds in self._waits[False]]
        return LATE * max(alone) if alone else None

    def tokens_per_s(self, *, lent: bool) -> float:
        """Pace of the recent waits of a kind; 0 where there was none."""
        return _pace(self._waits[lent])

    def note(self, *, num_tokens: int, seconds: float) -> Verdict | None:
        """A wait of the kind that `lends_next` said is over. Returns a comparison's verdict, if that was its last wait.

        Args:
            num_tokens: sampled by all engines meanwhile.
            seconds: from the trainer's last stage to its next one.
        """
        lent, verdict = self._next.popleft(), self.verdict
        if lent and not self._is_warm:
            self._is_warm = True
            return None
        is_of_comparison = verdict is None or lent != verdict.pays
        if verdict is not None and is_of_comparison and len(self._next) == NUM_CHECKS - 1:
            self._waits[lent].clear()  # what was measured before the last comparison is old
        self._waits[lent].append((num_tokens, seconds))
        if not self._next or (is_of_comparison and self._is_decided()):
            return self._compare()
        if not is_of_comparison and self._is_suspect():
            self._next = deque([False] * NUM_CHECKS)  # the work may have changed, or the machine
            self._keep_recent()
        return None

    def _is_decided(self) -> bool:
        lent, alone = (self.tokens_per_s(lent=kind) for kind in (True, False))
        return min(lent, alone) > 0 and max(lent, alone) > DECISIVE * min(lent, alone)

    def _compare(self) -> Verdict:
        lent, alone = (self.tokens_per_s(lent=kind) for kind in (True, False))
        pays, before = lent > alone, self.verdict
        is_as_before = before is not None and before.pays == pays
        self._hold = min(2 * self._hold, MAX_HOLD[pays]) if is_as_before else FIRST_HOLD
        self.verdict = Verdict(
            pays=pays,
            lent_tokens_per_s=lent,
            alone_tokens_per_s=alone,
            num_lent=len(self._waits[True]),
            num_alone=len(self._waits[False]),
            num_waits_held=self._hold,
        )
        self._next = deque([pays] * self._hold + [not pays] * NUM_CHECKS)
        return self.verdict

    def _is_suspect(self) -> bool:
        """A lending that was worth it has become slower than the waits without it were."""
        recent = list(self._waits[True])[-NUM_SUSPECT:]
        if self.verdict is None or not self.verdict.pays or len(recent) < NUM_SUSPECT:
            return False
        return _pace(recent) < self.tokens_per_s(lent=False)

    def _keep_recent(self) -> None:
        """Of the lendings those that gave the suspicion."""
        self._waits[True] = deque(list(self._waits[True])[-NUM_SUSPECT:], NUM_RECENT)


def _pace(waits: Collection[tuple[int, float]]) -> float:
    seconds = sum(seconds for _, seconds in waits)
    return sum(num_tokens for num_tokens, _ in waits) / seconds if seconds else 0.0
