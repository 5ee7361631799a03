"""What the page asks for, as JSON values: the overview, series, a step, its trajectories."""

from __future__ import annotations

import json
import math
import re
import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.observe import catalogue
from rollbook.observe.history import RunHistory
from rollbook.observe.run_dir import CONFIG, PLAN, is_in_use
from rollbook.types import Trajectory

Json = dict[str, Any]

SHOWN_EVENTS = (
    "finding", "drill", "step_failed", "publication",
    "publication_failed", "quarantined", "back_in_service", "preflight", "eviction", "failure",
    "checkpoint", "nonfinite", "sink_failed", "repair", "run_started", "run_resumed", "run_ended", "memory",
)  # fmt: skip
IMPORTANT_EVENTS = ("finding", "step_failed", "publication_failed", "quarantined")
MAX_EVENTS = 80
MAX_TRAJECTORIES = 256


def overview(history: RunHistory, now_s: float) -> Json:
    """State of the run, and what there is to ask for."""
    writer = is_in_use(history.path) if history.path.is_dir() else None
    has_ended = _last_lifecycle(history) == "run_ended"
    is_loading = history.loaded_frac < 1
    open_spans = [] if has_ended or is_loading else history.open_spans()
    return {
        "name": history.path.name or str(history.path),
        "path": str(history.path),
        "state": _state(history, is_live=writer is not None, has_ended=has_ended),
        "writer": writer,
        "loaded_frac": round(history.loaded_frac, 4),
        "num_steps": history.num_steps,
        "last_step": history.last_step,
        "planned_steps": _planned_steps(history.path),
        "first_at_s": history.first_at_s,
        "last_at_s": history.last_at_s,
        "now_s": now_s,
        "names": history.names,
        "open_spans": [
            {
                "name": span["name"],
                "step": span.get("step"),
                "expected_s": span.get("expected_s"),
                "open_s": max(0.0, (now_s if writer else history.last_at_s or now_s) - span["at_s"]),
            }
            for span in open_spans
        ],
        "events": _events(history),
        "trajectory_steps": _ends(history.trajectory_steps()),
    }


def _state(history: RunHistory, *, is_live: bool, has_ended: bool) -> str:
    """In a word; a lone file of metrics says nothing of how its run goes, unless nothing is in it yet."""
    if is_live:
        return "live"
    if not history.notable:
        return "ended" if history.num_steps else "empty"
    return "ended" if has_ended else "interrupted"


def _last_lifecycle(history: RunHistory) -> str | None:
    last = [
        history.notable[k][-1] for k in ("run_started", "run_resumed", "run_ended") if k in history.notable
    ]
    return max(last, key=lambda e: float(e["at_s"]))["kind"] if last else None


def _planned_steps(path: Path) -> int | None:
    try:
        config = tomllib.loads((path / CONFIG).read_text())
    except (OSError, ValueError):
        return None
    tables = [config, *(table for table in config.values() if isinstance(table, dict))]
    return next((t["num_steps"] for t in tables if isinstance(t.get("num_steps"), int)), None)


def _events(history: RunHistory) -> list[Json]:
    events = [event for kind in SHOWN_EVENTS for event in history.notable.get(kind, ())]
    events.sort(key=lambda event: float(event.get("at_s", 0.0)))
    important = [e for e in events if e["kind"] in IMPORTANT_EVENTS]
    latest = events[-MAX_EVENTS:]
    return [e for e in important[-MAX_EVENTS:] if e not in latest] + latest


def _ends(steps: list[int]) -> Json:
    return {"num": len(steps), "first": steps[0] if steps else None, "last": steps[-1] if steps else None}


def series(
    history: RunHistory, names: list[str], *, first: int | None, last: int | None, num_buckets: int
) -> Json:
    """Aligned columns: a value a bucket, `null` where there is none; min and max only where they differ."""
    table = history.table(names, first_step=first, last_step=last, num_buckets=num_buckets)
    columns: Json = {}
    for name, column in table.columns.items():
        columns[name] = {"mean": _rounded(column.mean)}
        if table.max_steps_per_bucket > 1:
            columns[name] |= {"min": _rounded(column.min), "max": _rounded(column.max)}
    return {"steps": table.steps.tolist(), "series": columns}


def _rounded(values: NDArray[np.float64]) -> list[float | None]:
    """Six significant digits, which is what a screen can show; what is smaller than a float's whole precision is 0."""
    finite = np.isfinite(values)
    values = np.where(np.abs(values) < 1e-290, 0.0, values)
    sizes = np.where(finite & (values != 0), np.abs(np.where(finite, values, 1.0)), 1.0)
    scale = 10.0 ** (5 - np.floor(np.log10(sizes)))
    rounded = np.round(np.where(finite, values, 0.0) * scale) / scale
    return [value if ok else None for value, ok in zip(rounded.tolist(), finite.tolist(), strict=True)]


def step(history: RunHistory, number: int) -> Json:
    """Every reading and every span of one step."""
    return {"step": number, "readings": history.readings(number), "spans": history.spans(number)}


def meanings(history: RunHistory) -> Json:
    """Unit and meaning of every metric that was reported."""
    found: Json = {}
    for name in history.names:
        metric = catalogue.lookup(name)
        if metric is not None:
            found[name] = {"unit": metric.unit, "meaning": metric.meaning, "reduction": metric.reduction}
    return found


def waterfall_of_plan(path: Path) -> list[Json]:
    """The loss waterfall that the plan predicted, when there is a plan."""
    try:
        plan = json.loads((path / PLAN).read_text())
    except (OSError, ValueError):
        return []
    rows = plan.get("waterfall") if isinstance(plan, dict) else None
    return [row for row in rows or [] if isinstance(row, dict)]


# -- trajectories


def trajectories(history: RunHistory, number: int) -> Json:
    """Summaries of the trajectories of the step, or of the nearest step before it that has a file."""
    found = _nearest(history, number)
    if found is None:
        return {"step": None, "num": 0, "rows": []}
    rows, _ = _read(history.path / "trajectories" / f"step_{found}.parquet")
    return {"step": found, "num": len(rows), "rows": [_summary(t) for t in rows[:MAX_TRAJECTORIES]]}


def trajectory(history: RunHistory, number: int, trajectory_id: str) -> Json | None:
    """Every token of one trajectory with its text, mask, logprob and weight version."""
    path = history.path / "trajectories" / f"step_{number}.parquet"
    if not path.exists():
        return None
    rows, loss_masks = _read(path)
    t = next((t for t in rows if t.trajectory_id == trajectory_id), None)
    if t is None:
        return None
    loss_mask = loss_masks.get(trajectory_id)
    ids = t.token_ids()
    versions: list[int | None] = [None] * len(t.prompt.prompt_ids)
    turns = []
    for turn in t.turns:
        start = len(versions)
        for run in turn.version_runs:
            versions += [run.weight_version] * run.num_tokens
        turns.append(
            {
                "start": start,
                "response_end": len(versions),
                "end": len(versions) + len(turn.observation_ids),
                "finish_reason": str(turn.finish_reason),
            }
        )
        versions += [None] * len(turn.observation_ids)
    return {
        **_summary(t),
        "step": number,
        "prompt_end": len(t.prompt.prompt_ids),
        "turns": turns,
        "ids": ids.tolist(),
        "texts": [history.token_texts.get(int(i)) for i in ids],
        "action": t.action_mask().tolist(),
        "loss": None if loss_mask is None else loss_mask.tolist(),
        "logprobs": [round(float(x), 4) if math.isfinite(x) else None for x in t.behavior_logprobs()],
        "versions": versions,
        "task": {key: str(value)[:2000] for key, value in t.prompt.task.items()},
        "failure_message": t.failure.message if t.failure else None,
    }


def _summary(t: Trajectory) -> Json:
    has_tokens = any(turn.version_runs for turn in t.turns)
    return {
        "id": t.trajectory_id,
        "prompt_id": t.prompt.prompt_id,
        "source": t.prompt.source,
        "reward": t.reward,
        "reward_terms": t.reward_terms,
        "failure": str(t.failure.kind) if t.failure else None,
        "num_prompt_tokens": len(t.prompt.prompt_ids),
        "num_response_tokens": t.num_response_tokens,
        "num_turns": len(t.turns),
        "oldest_version": t.oldest_version if has_tokens else None,
        "newest_version": t.newest_version if has_tokens else None,
        "finish_reason": str(t.turns[-1].finish_reason) if t.turns else None,
        "replica_id": t.replica_id,
        "duration_s": round(t.finished_at_s - t.started_at_s, 4),
    }


def _nearest(history: RunHistory, number: int) -> int | None:
    steps = history.trajectory_steps()
    before = [s for s in steps if s <= number]
    return before[-1] if before else (steps[0] if steps else None)


def _read(path: Path) -> tuple[list[Trajectory], dict[str, NDArray[np.bool_]]]:
    return _read_version(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def _read_version(path: Path, mtime_ns: int) -> tuple[list[Trajectory], dict[str, NDArray[np.bool_]]]:
    from rollbook.observe.trajectories import read_loss_masks, read_trajectories

    return read_trajectories(path), read_loss_masks(path)


# -- the page as one file


def page_html(embedded: Json | None = None) -> str:
    """The page with its style and script inline; with `embedded` it needs no server."""
    from importlib import resources

    folder = resources.files("rollbook.observe.page")
    html, css, js = (
        (folder / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    data = json.dumps(embedded, allow_nan=False) if embedded is not None else "null"
    # "</" would end the script element, whatever stands around it.
    parts = {
        "STYLE": css,
        "SCRIPT": js,
        "EMBEDDED": data.replace("</", "<\\/"),
        "STAGES": json.dumps({suffix: stage for stage, suffix in catalogue.STAGES.items()}),
    }
    return re.sub(r"\{\{(" + "|".join(parts) + r")\}\}", lambda found: parts[found[1]], html)


def exported(history: RunHistory, now_s: float, *, num_steps: int = 60, num_trajectory_steps: int = 8) -> str:
    """The page after the fact: series of the whole run, and the last and evenly spaced steps in full."""
    numbers = _spaced(history.steps.tolist(), num_steps)
    with_trajectories = _spaced(history.trajectory_steps(), num_trajectory_steps)
    lists = {number: trajectories(history, number) for number in with_trajectories}
    for number, listed in lists.items():
        listed["rows"] = listed["rows"][:32]
        listed["details"] = {row["id"]: trajectory(history, number, row["id"]) for row in listed["rows"]}
    return page_html(
        {
            "overview": overview(history, now_s) | {"state": "exported"},
            "series": series(history, history.names, first=None, last=None, num_buckets=600),
            "steps": {number: step(history, number) for number in numbers},
            "trajectories": lists,
            "meanings": meanings(history),
            "plan": waterfall_of_plan(history.path),
        }
    )


def _spaced(numbers: list[int], num: int) -> list[int]:
    """The last half as they are, the other half evenly spaced over the rest."""
    if len(numbers) <= num:
        return numbers
    last = numbers[-(num // 2) :]
    rest = numbers[: -(num // 2)]
    return [rest[i] for i in np.linspace(0, len(rest) - 1, num - len(last)).astype(int)] + last
