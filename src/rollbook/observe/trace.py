"""One step as a trace: every span with its planned length, every event, every trajectory.

`chrome_trace` is read by ui.perfetto.dev and chrome://tracing. `otlp_trace` holds the trajectories as
OpenTelemetry spans (OTLP/JSON, which any collector accepts over HTTP).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

from rollbook.errors import RunError
from rollbook.observe.catalogue import STAGES_OUTSIDE_STEP
from rollbook.observe.history import RunHistory
from rollbook.types import Trajectory

Json = dict[str, Any]

MEASURED, PLANNED, TRAJECTORIES = 1, 2, 3
"""Process rows of the Chrome trace."""
_SPAN_FIELDS = ("step", "tokens", "bytes", "expected_bytes", "expected_s", "error")


def chrome_trace(history: RunHistory, step: int) -> Json:
    """The step in Chrome's trace format; times are microseconds since the step began.

    Raises:
        RunError: events.jsonl holds no spans of that step.
    """
    events = _events_of(history, step)
    spans = [event for event in events if event["kind"] == "span"]
    start_s = next(span for span in spans if span["name"] == "step")["mono_s"]
    measured_s = _measured_s(spans)
    rows = _Rows()
    traced: list[Json] = []
    for span in sorted(spans, key=lambda s: (s["mono_s"], -s["duration_s"])):
        at = {"name": span["name"], "cat": "span", "ph": "X", "ts": _us(span["mono_s"] - start_s)}
        args = {name: span[name] for name in _SPAN_FIELDS if name in span} | span.get("attrs", {})
        traced.append(
            at
            | {
                "dur": _us(span["duration_s"]),
                "pid": MEASURED,
                "tid": rows.of(MEASURED, span["track"]),
                "args": args,
            }
        )
        if "expected_s" in span:
            seconds = measured_s[span["span_id"]]
            ratio = round(seconds / span["expected_s"], 4) if span["expected_s"] else None
            measured = {"measured_s": seconds, "ratio": ratio}
            tid = rows.of(PLANNED, span["track"] if span["name"] != "step" else "step")
            traced.append(at | {"dur": _us(span["expected_s"]), "pid": PLANNED, "tid": tid, "args": measured})
    for event in events:
        if event["kind"] not in ("span", "span_open"):
            args = {k: v for k, v in event.items() if k not in ("kind", "at_s", "mono_s")}
            traced.append(
                {
                    "name": event["kind"],
                    "cat": "event",
                    "ph": "i",
                    "s": "p",
                    "ts": _us(event["mono_s"] - start_s),
                    "pid": MEASURED,
                    "tid": rows.of(MEASURED, "events"),
                    "args": args,
                }
            )
    for lane, trajectory in _lanes(_trajectories_of(history, step)):
        traced.append(
            {
                "name": trajectory.trajectory_id,
                "cat": "trajectory",
                "ph": "X",
                "ts": _us(trajectory.started_at_s - start_s),
                "dur": _us(trajectory.finished_at_s - trajectory.started_at_s),
                "pid": TRAJECTORIES,
                "tid": rows.of(TRAJECTORIES, f"slot {lane}"),
                "args": _attributes(trajectory),
            }
        )
    return {
        "traceEvents": rows.metadata() + traced,
        "displayTimeUnit": "ms",
        "otherData": {"run": history.path.name, "step": step},
    }


def otlp_trace(history: RunHistory, step: int) -> Json:
    """The step and its trajectories as OpenTelemetry spans in OTLP/JSON.

    Raises:
        RunError: events.jsonl holds no spans of that step.
    """
    whole = next(e for e in _events_of(history, step) if e["kind"] == "span" and e["name"] == "step")
    run = history.path.name
    unix_offset_s = whole["at_s"] - whole["mono_s"]  # trajectories carry the monotonic clock
    trace_id = hashlib.sha256(f"{run}/step {step}".encode()).hexdigest()[:32]

    def span(name: str, key: str, start_s: float, end_s: float, attributes: Json, error: str | None) -> Json:
        return {
            "traceId": trace_id,
            "spanId": hashlib.sha256(f"{trace_id}/{key}".encode()).hexdigest()[:16],
            "name": name,
            "kind": 1,
            "startTimeUnixNano": str(round((start_s + unix_offset_s) * 1e9)),
            "endTimeUnixNano": str(round((end_s + unix_offset_s) * 1e9)),
            "attributes": [
                {"key": k, "value": _otlp_value(v)} for k, v in attributes.items() if v is not None
            ],
            "status": {"code": 2, "message": error} if error else {"code": 1},
        }

    root = span(
        f"step {step}",
        "step",
        whole["mono_s"],
        whole["mono_s"] + whole["duration_s"],
        {"expected_s": whole.get("expected_s")},
        whole.get("error"),
    )
    spans = [root]
    for t in _trajectories_of(history, step):
        failure = f"{t.failure.kind}: {t.failure.message}" if t.failure else None
        one = span("trajectory", t.trajectory_id, t.started_at_s, t.finished_at_s, _attributes(t), failure)
        spans.append(one | {"parentSpanId": root["spanId"]})
    resource = {"attributes": [{"key": "service.name", "value": _otlp_value(f"rollbook/{run}")}]}
    return {
        "resourceSpans": [
            {"resource": resource, "scopeSpans": [{"scope": {"name": "rollbook"}, "spans": spans}]}
        ]
    }


class _Rows:
    """Numbers for the named rows of a trace, and the metadata that names them."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, str], int] = {}

    def of(self, process: int, name: str) -> int:
        return self._ids.setdefault((process, name), len(self._ids) + 1)

    def metadata(self) -> list[Json]:
        titles = {MEASURED: "measured", PLANNED: "planned", TRAJECTORIES: "trajectories"}
        used = {process for process, _ in self._ids}
        named = [
            {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": title}}
            for pid, title in titles.items()
            if pid in used
        ]
        ordered = [
            {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
            for pid in sorted(used)
        ]
        threads = [
            {"name": "thread_name", "ph": "M", "pid": process, "tid": tid, "args": {"name": name}}
            for (process, name), tid in self._ids.items()
        ]
        return named + ordered + threads


def _events_of(history: RunHistory, step: int) -> list[Json]:
    events = history.events(step)
    if not any(event["kind"] == "span" and event["name"] == "step" for event in events):
        known = history.steps_with_spans()
        where = f"steps {known[0]} to {known[-1]} have spans" if known else "this run recorded no spans"
        raise RunError(f"{history.path} holds no spans of step {step}", where)
    return events


def _trajectories_of(history: RunHistory, step: int) -> list[Trajectory]:
    from rollbook.observe.trajectories import read_trajectories

    if step not in history.trajectory_steps():
        return []
    found = read_trajectories(history.path / "trajectories" / f"step_{step}.parquet")
    return sorted((t for t in found if t.finished_at_s > t.started_at_s), key=lambda t: t.started_at_s)


def _lanes(trajectories: Sequence[Trajectory]) -> Iterable[tuple[int, Trajectory]]:
    """Each with the first row that is free at its start, so that no two overlap."""
    ends: list[float] = []
    for trajectory in trajectories:
        lane = next((i for i, end in enumerate(ends) if end <= trajectory.started_at_s), len(ends))
        ends[lane : lane + 1] = [trajectory.finished_at_s]
        yield lane, trajectory


def _attributes(t: Trajectory) -> Json:
    has_tokens = t.num_response_tokens > 0
    return {
        "trajectory_id": t.trajectory_id,
        "prompt_id": t.prompt.prompt_id,
        "source": t.prompt.source,
        "replica_id": t.replica_id,
        "num_turns": len(t.turns),
        "num_response_tokens": t.num_response_tokens,
        "oldest_version": t.oldest_version if has_tokens else None,
        "newest_version": t.newest_version if has_tokens else None,
        "finish_reason": str(t.turns[-1].finish_reason) if t.turns else None,
        "reward": t.reward,
        "failure": str(t.failure.kind) if t.failure else None,
    }


def _otlp_value(value: object) -> Json:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _measured_s(spans: Sequence[Json]) -> dict[int, float]:
    """Span id -> the seconds that its expectation is about, as `timing_s/…` counts them: a step without the stages that
    are none of its work, a stage with its later parts, of which nothing is expected by itself (a probe after a
    publication)."""
    seconds = {span["span_id"]: span["duration_s"] for span in spans}
    steps = {span["span_id"] for span in spans if span["name"] == "step"}
    planned: dict[tuple[int, str], int] = {}
    for span in sorted(spans, key=lambda s: s["mono_s"]):
        if span.get("parent_id") not in steps:
            continue
        stage: tuple[int, str] = (span["parent_id"], span["name"])
        if span["name"] in STAGES_OUTSIDE_STEP:
            seconds[span["parent_id"]] -= span["duration_s"]
        if "expected_s" in span:
            planned[stage] = span["span_id"]
        elif stage in planned:
            seconds[planned[stage]] += span["duration_s"]
    return seconds
