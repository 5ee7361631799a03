"""Our run directory: `metrics.jsonl` beside `events.jsonl` (spans, publications, failures, restarts).

An event becomes an `Event` of the same kind, and errors in words are read as in any console log. Of a run that
is going on, what has been open for how long becomes `open_span`. Injected faults (kind `fault`) and findings
made during the run are left out: a diagnosis stands on signals.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollbook.diagnose.readers import verl_file
from rollbook.diagnose.readers.text import lines
from rollbook.diagnose.readers.trouble import TroubleWatcher
from rollbook.diagnose.series import Event, Row
from rollbook.observe.run_dir import EVENTS, METRICS, is_in_use

_KEPT = frozenset(
    {
        "run_started",
        "run_resumed",
        "run_ended",
        "run_failed",
        "step_failed",
        "publication",
        "publication_failed",
        "probe_failed",
        "nonfinite",
        "checkpoint",
        "interrupted",
        "quarantined",
        "back_in_service",
    }
)
MAX_EVENTS = 200_000
"""Kept events beyond which a log repeats itself."""


def read(path: Path, *, now_s: float | None = None) -> Iterator[Row | Event]:
    """Rows of `path/metrics.jsonl`, timed by the ends of the step spans, then the events.

    Args:
        now_s: unix seconds; tells how long a live run's open spans have been open.
    """
    log = _EventLog()
    if (path / EVENTS).exists():
        for text in lines(path / EVENTS):
            log.add(text)
    life, newest = 0, -1
    for item in verl_file.read(path / METRICS) if (path / METRICS).exists() else ():
        if isinstance(item, Row) and item.at_s is None:
            life += item.step < newest  # the run was taken up again, and repeats steps
            newest = item.step
            life = next((i for i in range(life, len(log.lives)) if item.step in log.lives[i]), life)
            at_s = log.lives[life].get(item.step) if life < len(log.lives) else None
            yield Row(step=item.step, data=item.data, at_s=at_s)
        else:
            yield item
    yield from log.events
    if is_in_use(path):
        now_s = time.time() if now_s is None else now_s
        for span in log.open_spans.values():
            open_s = now_s - (span.at_s if span.at_s is not None else now_s)
            yield Event(
                kind="open_span", step=span.step, at_s=span.at_s, text=span.text, fields={"open_s": open_s}
            )


class _EventLog:
    """What events.jsonl says, line by line."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.lives: list[dict[int, float]] = [{}]
        """Of each life of the run: step -> unix time at which it ended."""
        self.open_spans: dict[int, Event] = {}
        self._newest_step: int | None = None

    def add(self, text: str) -> None:
        try:
            value = json.loads(text)
        except ValueError:
            return
        if not isinstance(value, dict) or not isinstance(kind := value.get("kind"), str):
            return
        step = value["step"] if isinstance(value.get("step"), int) else None
        at_s = float(value["at_s"]) if isinstance(value.get("at_s"), int | float) else None
        if kind in ("run_started", "run_resumed"):
            self.open_spans.clear()
            self.lives += [{}] if self.lives[-1] else []
            step = self._newest_step if step is None else step
        if kind == "span_open" and isinstance(value.get("span_id"), int):
            self.open_spans[value["span_id"]] = Event(
                kind=kind, step=step, at_s=at_s, text=str(value.get("name"))
            )
        elif kind == "span":
            self._end_span(value, step, at_s)
        elif kind in _KEPT and len(self.events) < MAX_EVENTS:
            words = str(
                next(filter(None, map(value.get, ("error", "message", "reason", "why", "effect"))), "")
            )
            self.events.append(Event(kind=kind, step=step, at_s=at_s, text=words[:300], fields=value))
            if kind != "quarantined":  # a replica that died ends nothing: the others go on
                self._read_words(words, step, "sync" if kind == "publication_failed" else "")

    def _end_span(self, value: dict[str, Any], step: int | None, at_s: float | None) -> None:
        self.open_spans.pop(value.get("span_id", -1), None)
        if value.get("name") == "step" and step is not None:
            self._newest_step = step
            if at_s is not None:
                self.lives[-1][step] = at_s + float(value.get("duration_s") or 0.0)
        if value.get("error"):
            self._read_words(str(value["error"]), step, str(value.get("name")))

    def _read_words(self, words: str, step: int | None, span: str = "") -> None:
        """An error in words tells what a console log would: out of memory, a collective that timed out."""
        event = TroubleWatcher().watch(words, step) if words else None
        if event is not None:
            stage = {"sync": "sync", "to_rollout": "sync", "to_trainer": "sync", "train": "train"}.get(span)
            if event.kind == "out_of_memory" and any(
                e.kind == event.kind and (e.step == step or step is None) for e in self.events
            ):
                return  # the step's span, and the run's end, repeat what its stage said
            self.events.append(
                Event(kind=event.kind, step=step, text=event.text, fields={"stage": stage} if stage else {})
            )
