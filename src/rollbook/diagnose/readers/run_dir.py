"""Our run directory: `metrics.jsonl` beside `events.jsonl` (spans, publications, failures, restarts).

An event becomes an `Event` of the same kind; steps whose span never ended stay visible as `span_open`.
Injected faults (kind `fault`) and findings made during the run are left out: a diagnosis stands on signals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from rollbook.diagnose.readers import verl_file
from rollbook.diagnose.readers.text import lines
from rollbook.diagnose.series import Event, Row

_KEPT = frozenset(
    {
        "run_started",
        "run_resumed",
        "run_ended",
        "step_failed",
        "publication",
        "engine_state",
        "failure",
        "eviction",
        "nonfinite",
        "checkpoint",
        "memory",
    }
)
MAX_EVENTS = 200_000


def read(path: Path) -> Iterator[Row | Event]:
    """Rows of `path/metrics.jsonl`, timed by the ends of the step spans, then the events."""
    events, ends, open_spans = _events(path / "events.jsonl")
    for item in verl_file.read(path / "metrics.jsonl"):
        if isinstance(item, Row) and item.at_s is None and item.step in ends:
            yield Row(step=item.step, data=item.data, at_s=ends[item.step])
        else:
            yield item
    yield from events
    yield from open_spans


def _events(path: Path) -> tuple[list[Event], dict[int, float], list[Event]]:
    """Kept events, the unix time at which each step ended, and the spans that never ended."""
    events: list[Event] = []
    ends: dict[int, float] = {}
    open_spans: dict[int, Event] = {}
    if not path.exists():
        return events, ends, []
    for text in lines(path):
        try:
            value = json.loads(text)
        except ValueError:
            continue
        if not isinstance(value, dict) or not isinstance(kind := value.get("kind"), str):
            continue
        step = value.get("step") if isinstance(value.get("step"), int) else None
        at_s = value.get("at_s") if isinstance(value.get("at_s"), int | float) else None
        if kind in ("run_started", "run_resumed"):
            open_spans.clear()
        if kind == "span_open" and isinstance(span_id := value.get("span_id"), int):
            open_spans[span_id] = Event(
                kind=kind, step=step, at_s=at_s, text=str(value.get("name")), fields=value
            )
        elif kind == "span":
            open_spans.pop(value.get("span_id", -1), None)
            duration_s = value.get("duration_s")
            if value.get("name") == "step" and step is not None and at_s is not None:
                ends[step] = at_s + float(duration_s or 0.0)
            if value.get("error"):
                events.append(
                    Event(
                        kind="span_error", step=step, at_s=at_s, text=str(value["error"])[:300], fields=value
                    )
                )
        elif kind in _KEPT and len(events) < MAX_EVENTS:
            text = str(value.get("error") or value.get("message") or value.get("reason") or "")
            events.append(Event(kind=kind, step=step, at_s=at_s, text=text[:300], fields=value))
    return events, ends, list(open_spans.values())
