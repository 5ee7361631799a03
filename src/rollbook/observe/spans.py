"""Spans: timed intervals, nested by context, each with what was expected of it.

The parent of a span is the span open in the same thread or task (a task inherits it from its creator). A
span whose parent has already ended belongs to no step: it is background work, recorded on its own track.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from rollbook.errors import RunError

Attr = str | int | float | bool | None | list[int] | list[str] | list[float]
"""What an event or a span may carry beside its own fields: JSON values, flat."""


@dataclass(slots=True, kw_only=True, eq=False)
class Span:
    """One timed interval. `set` adds what was measured while it was open."""

    name: str
    span_id: int
    parent: Span | None
    step: int | None
    track: str
    """Thread and task it ran on."""
    at_s: float
    mono_s: float
    expected_s: float | None = None
    expected_bytes: int | None = None
    num_bytes: int | None = None
    num_tokens: int | None = None
    attrs: dict[str, Attr] = field(default_factory=dict)
    duration_s: float | None = None
    """None while open."""
    error: str | None = None
    core_wait_s: float | None = None
    """In which a thread could have run and got no core; None where the system does not say."""

    def set(
        self,
        *,
        bytes: int | None = None,
        tokens: int | None = None,
        expected_s: float | None = None,
        expected_bytes: int | None = None,
        **attrs: Attr,
    ) -> None:
        """Add measured or expected quantities: bytes moved, tokens processed, anything else by name."""
        if self.duration_s is not None:
            raise RunError(f"span {self.name!r} has ended", "call span.set() inside the `with` block")
        self.num_bytes = self.num_bytes if bytes is None else int(bytes)
        self.num_tokens = self.num_tokens if tokens is None else int(tokens)
        self.expected_s = self.expected_s if expected_s is None else float(expected_s)
        self.expected_bytes = self.expected_bytes if expected_bytes is None else int(expected_bytes)
        self.attrs.update(attrs)

    def fields(self) -> dict[str, object]:
        """The event line of a span that ended; absent quantities are left out."""
        optional = {
            "parent_id": self.parent.span_id if self.parent else None,
            "step": self.step,
            "expected_s": self.expected_s,
            "bytes": self.num_bytes,
            "expected_bytes": self.expected_bytes,
            "tokens": self.num_tokens,
            "core_wait_s": self.core_wait_s,
            "error": self.error,
            "attrs": self.attrs or None,
        }
        return {
            "name": self.name,
            "span_id": self.span_id,
            "track": self.track,
            "duration_s": self.duration_s,
            **{name: value for name, value in optional.items() if value is not None},
        }


current_span: ContextVar[Span | None] = ContextVar("rollbook_current_span", default=None)


def covered_s(spans: list[Span]) -> float:
    """Seconds covered by at least one of the ended spans (their union, not their sum)."""
    total = 0.0
    end = float("-inf")
    for span in sorted(spans, key=lambda s: s.mono_s):
        span_end = span.mono_s + (span.duration_s or 0.0)
        total += max(0.0, span_end - max(end, span.mono_s))
        end = max(end, span_end)
    return total
