"""How a run ended, from its own events: what reconciliation says of one that no step came out of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollbook.errors import DataError
from rollbook.observe.run_dir import EVENTS, METRICS, is_in_use, read_json_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """What the last process of a run directory left behind."""

    num_steps: int
    """Finished steps in metrics.jsonl."""
    failed_step: int | None
    cause: str
    """Empty: it ended in order, or nothing says why it did not."""
    remedy: str
    last_span: str
    """What was open when the events stop; empty when nothing was."""
    is_running: bool
    in_order: bool
    """The process left the directory itself."""

    @property
    def why(self) -> str:
        """The cause as a clause; empty when the run ended in order."""
        if self.cause:
            where = f" in step {self.failed_step}" if self.failed_step is not None else ""
            return f"it failed{where}: {self.cause}"
        if self.is_running:
            return f"it is still at work{f' in {self.last_span!r}' if self.last_span else ''}"
        if self.in_order:
            return ""
        return (
            f"its process was killed{f' in {self.last_span!r}' if self.last_span else ''}, and left no word"
        )


def ending_of(folder: Path) -> Ending | None:
    """The ending of our own run directory; None for anything else.

    Events of earlier processes, before the run was taken up again, do not count.
    """
    if not (folder / EVENTS).exists():
        return None
    cause, remedy, failed_step, in_order = "", "", None, False
    open_spans: dict[Any, str] = {}
    for event in read_json_lines(folder / EVENTS):
        kind = event.get("kind")
        if kind in ("run_started", "run_resumed"):
            cause, remedy, failed_step, in_order = "", "", None, False
            open_spans.clear()
        elif kind == "step_failed":
            cause, failed_step = str(event.get("error", "")), event.get("step")
        elif kind == "run_failed":
            # The step's own words carry the error's name; without a step these are all there is.
            cause, remedy = cause or str(event.get("error", "")), str(event.get("remedy", ""))
        elif kind == "run_ended":
            in_order = True
        elif kind == "span_open":
            open_spans[event.get("span_id")] = str(event.get("name"))
        elif kind == "span":
            open_spans.pop(event.get("span_id"), None)
            if event.get("name") == "step" and not event.get("error"):
                cause, failed_step = "", None  # the step was repeated, and went well
    metrics = folder / METRICS
    return Ending(
        num_steps=sum(1 for _ in read_json_lines(metrics)) if metrics.exists() else 0,
        failed_step=failed_step if isinstance(failed_step, int) else None,
        cause=cause,
        remedy=remedy,
        last_span=next(reversed(open_spans.values()), ""),
        is_running=is_in_use(folder) is not None,
        in_order=in_order,
    )


def require_finished_step(folder: Path) -> None:
    """Raises DataError, with the recorded cause, for a run of ours of which no step finished."""
    ending = ending_of(folder)
    if ending is None or ending.num_steps:
        return
    why = ending.why or "it ended in order before its first step"
    remedy = ending.remedy
    if not remedy:
        remedy = (
            "wait for its first step"
            if ending.is_running
            else f"see {folder / EVENTS}, or `rollbook diagnose`"
        )
    raise DataError(f"no step of {folder} finished, so there is nothing to compare: {why}", remedy)
