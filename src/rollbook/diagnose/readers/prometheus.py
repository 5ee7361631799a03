"""A Prometheus server's query API: what was scraped from a run, as series over its steps.

The exporter writes the catalogue's names with every character outside [a-zA-Z0-9_] as "_" and `rollbook_` in
front, and the metric's own name in the label `metric`; the step in progress is `rollbook_training_global_step`.
Times of scrapes become steps through that series; without it one scrape counts as one step.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator
from typing import Any

import httpx

from rollbook.diagnose.readers.text import number
from rollbook.diagnose.series import Event, Row
from rollbook.errors import DataError
from rollbook.observe import catalogue

PREFIX = "rollbook_"
STEP_METRIC = "rollbook_training_global_step"
MAX_POINTS = 11_000
"""Points a series that one `query_range` may return (the server's limit)."""


def read(url: str, *, hours: float = 24.0, now_s: float | None = None) -> Iterator[Row | Event]:
    """Rows of the last `hours` of the job scraped by the server at `url` (for example http://localhost:9090)."""
    end_s = time.time() if now_s is None else now_s
    start_s = end_s - hours * 3600
    stride_s = max(1.0, (end_s - start_s) / (MAX_POINTS - 1))
    with httpx.Client(base_url=url.rstrip("/"), timeout=60.0) as client:
        found = _query(
            client,
            "/api/v1/query_range",
            {"query": '{__name__=~"rollbook_.+"}', "start": start_s, "end": end_s, "step": stride_s},
        )
    series = found.get("result", [])
    if not series:
        raise DataError(
            f"the Prometheus server at {url} has no series {PREFIX}* of the last {hours:g} hours",
            "check that it scrapes the run's endpoint, or give --hours",
        )
    clock = next((s["values"] for s in series if s["metric"].get("__name__") == STEP_METRIC), None)
    times = (
        [float(t) for t, _ in clock] if clock else sorted({float(t) for s in series for t, _ in s["values"]})
    )
    steps = [int(float(v)) for _, v in clock] if clock else list(range(len(times)))
    names = {_exported(name): name for name in catalogue.names() if "{" not in name}
    rows: dict[int, dict[str, float]] = {}
    at_s: dict[int, float] = {}
    for one in series:
        labels = one["metric"]
        name = (
            labels.get("metric") or names.get(labels["__name__"]) or labels["__name__"].removeprefix(PREFIX)
        )
        for t, value in one["values"]:
            i = bisect.bisect_right(times, float(t)) - 1
            parsed = number(value)
            if i >= 0 and parsed is not None:
                rows.setdefault(steps[i], {})[name] = parsed  # the last scrape within a step stands
                at_s[steps[i]] = max(at_s.get(steps[i], 0.0), float(t))
    for step in sorted(rows):
        yield Row(step=step, data=rows[step], at_s=at_s[step])


def _exported(name: str) -> str:
    return PREFIX + "".join(c if c.isalnum() or c == "_" else "_" for c in name)


def _query(client: httpx.Client, path: str, params: dict[str, Any]) -> dict[str, Any]:
    try:
        response = client.get(path, params=params)
        body = response.json()
    except (httpx.HTTPError, ValueError) as error:
        raise DataError(
            f"no answer of a Prometheus server at {client.base_url} ({error})", "check the URL"
        ) from error
    if not isinstance(body, dict) or body.get("status") != "success":
        raise DataError(
            f"the Prometheus server at {client.base_url} answered {response.status_code}: {body}",
            "check the URL and the server's log",
        )
    data = body["data"]
    assert isinstance(data, dict)
    return data
