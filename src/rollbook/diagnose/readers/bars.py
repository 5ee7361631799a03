"""Progress bars of a training that prints nothing else: which step it was at, and how long steps took.

Facts (tqdm): "Training Progress:   1%|▏ | 23/2196 [38:38<56:20:06, 93.33s/it]" is drawn again and again; the time in
front of "<" is what has passed since the bar was begun. Bars of loading, mapping and sampling have names of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_BAR = re.compile(
    r"(?:^|[\r\]])\s*(?:([^|%\[\]]{0,60}?):?\s+)?\d+%\|[^|]*\|\s*(\d+)/(\d+) \[((?:\d+:)?\d+:\d+)<"
)
_OF_TRAINING = re.compile(r"train|step|progress|grpo|ppo|iter|epoch", re.IGNORECASE)
_OF_OTHERS = re.compile(
    r"generat|sampl|load|map|token|eval|valid|download|shard|captur|rollout", re.IGNORECASE
)
LEAST_STEPS = 3


@dataclass(slots=True)
class Bars:
    """The bars of a training, drawn line by line."""

    seconds: dict[int, float] = field(default_factory=dict)
    """Step -> seconds a step since the bar before it."""
    of: int = 0
    """Steps that were planned."""
    newest: int | None = None
    _begun: tuple[int, float] | None = None

    def add(self, line: str) -> None:
        """A line, already plain."""
        if "%|" not in line:
            return
        for name, at, of, passed in _BAR.findall(line):
            if (name and not _OF_TRAINING.search(name)) or _OF_OTHERS.search(name) or int(of) < LEAST_STEPS:
                continue
            step, now_s = int(at), seconds_of(passed)
            if self.of != int(of):
                self.seconds, self.of, self._begun = {}, int(of), None
            if self._begun is not None and step > self._begun[0] and now_s >= self._begun[1]:
                self.seconds[step] = (now_s - self._begun[1]) / (step - self._begun[0])
            if self._begun is None or step != self._begun[0]:
                self._begun = (step, now_s)
            self.newest = step

    @property
    def tell(self) -> bool:
        """Whether there are steps enough to be a training."""
        return len(self.seconds) >= LEAST_STEPS


def seconds_of(passed: str) -> float:
    """Seconds of "38:38" or "1:02:03".

    >>> seconds_of("1:02:03")
    3723.0
    """
    total = 0
    for part in passed.split(":"):
        total = 60 * total + int(part)
    return float(total)
