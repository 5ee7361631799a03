"""What a rule says: a finding, or that it could not judge. Both are plain data, printable as JSON."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Area = Literal["data", "version", "async", "implementation"]
"""The order of the decision tree: cheap and frequent causes first."""

Lack = Literal[
    "environments",
    "rewards by source",
    "filter of flat groups",
    "gap of trainer and engine",
    "versions or ages of samples",
    "seconds of generation",
    "seconds of stages",
    "device memory",
    "answer of a rule that failed",
]
"""What a log has nothing of, or that its rule could not read it."""


class RuleFailed(RuntimeWarning):
    """A rule raised. The other rules judge all the same; warnings made errors show where it did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One series at one step: what it was and what it became."""

    metric: str
    step: int
    before: float | None = None
    after: float | None = None
    says: str
    """In words, with the numbers."""
    in_log: str = ""
    """What the log calls the metric, where that is another name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A cause that fits what was seen."""

    rule: str
    title: str
    area: Area
    confidence: float
    """0 to 1: how well the signs single this cause out."""
    step: int
    """First step at which it shows."""
    evidence: tuple[Evidence, ...]
    cost_s: float | None = None
    """Seconds lost so far, where the loss is time."""
    cost_reward: float | None = None
    """Mean reward lost, where the loss is reward."""
    action: str
    next_check: str
    until_step: int | None = None
    """Where it ended by itself."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class NotJudged:
    """A rule that lacked its signals."""

    rule: str
    lacks: Lack
    missing: tuple[str, ...]
    collect: str
    """What to switch on so that the next log can be judged."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Something of the algorithm or the data that limits the run while the system is well."""

    name: str
    title: str
    step: int
    evidence: tuple[Evidence, ...]
    advice: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One of the four signals, as proof when nothing is wrong."""

    name: str
    verdict: Literal["well", "moved", "not collected"]
    says: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherRun:
    """Another run of the same log, or another log of the same folder, in one line."""

    run_idx: int
    num_steps: int
    verdict: str
    title: str
    """Of its first finding; empty where there is none."""
    step: int | None = None
    """Onset of that finding."""
    log: str = ""
    """Of another log: its path."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The whole answer, causes first."""

    source: str
    format: str
    first_step: int
    last_step: int
    num_steps: int
    findings: tuple[Finding, ...]
    """The cause first, then independent ones."""
    consequences: tuple[Finding, ...]
    """Findings that an earlier one explains."""
    states: tuple[State, ...]
    signals: tuple[Signal, ...]
    not_judged: tuple[NotJudged, ...]
    notes: tuple[str, ...]
    renamed: dict[str, str] = field(default_factory=dict)
    other_runs: tuple[OtherRun, ...] = ()
    """What is wrong with the other runs of the same log, or with the other logs of the folder."""

    @property
    def is_well(self) -> bool:
        return not self.findings

    @property
    def missing_signals(self) -> tuple[str, ...]:
        """Those of the four signals that nothing was logged of."""
        return tuple(s.name for s in self.signals if s.verdict == "not collected")

    @property
    def failed_rules(self) -> tuple[str, ...]:
        """Those that raised instead of judging."""
        return tuple(n.rule for n in self.not_judged if n.lacks == "answer of a rule that failed")

    @property
    def verdict(self) -> str:
        """One word for programs: a rule's name, "well", or "not_judged" when two or more of the four signals are
        missing or a rule failed."""
        if self.findings:
            return self.findings[0].rule
        return "well" if len(self.missing_signals) < 2 and not self.failed_rules else "not_judged"

    def to_json(self) -> dict[str, Any]:
        """JSON values only: what is not finite is null."""
        answer = {
            "verdict": self.verdict,
            "source": self.source,
            "format": self.format,
            "steps": {"first": self.first_step, "last": self.last_step, "count": self.num_steps},
            "findings": [f.to_json() for f in self.findings],
            "consequences": [f.to_json() for f in self.consequences],
            "states": [s.to_json() for s in self.states],
            "signals": [s.to_json() for s in self.signals],
            "not_judged": [n.to_json() for n in self.not_judged],
            "notes": list(self.notes),
            "renamed": self.renamed,
            "other_runs": [r.to_json() for r in self.other_runs],
        }
        plain: dict[str, Any] = _finite(answer)
        return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
