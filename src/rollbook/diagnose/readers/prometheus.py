"""A Prometheus server's query API: what was scraped from a run, as series over its steps.

Every exported series carries the catalogue's name in its label `metric` (`observe/prometheus.py`); the scrape
times become steps through `training/global_step`. Without that series one scrape counts as one step.
"""

from __future__ import annotations

import bisect
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

from rollbook.diagnose.readers.text import number
from rollbook.diagnose.series import Event, Row
from rollbook.errors import DataError

STEP_METRIC = "training/global_step"
MAX_POINTS = 11_000
"""Points a series that one `query_range` may return (the server's limit)."""


def read(url: str, *, hours: float = 24.0, now_s: float | None = None) -> Iterator[Row | Event]:
    """Rows of the newest run that the server at `url` (http://localhost:9090, say) scraped in the last `hours`.

    Raises:
        DataError: no server there, or nothing of rollbook in it.
    """
    end_s = time.time() if now_s is None else now_s
    start_s = end_s - hours * 3600
    stride_s = max(1.0, (end_s - start_s) / (MAX_POINTS - 1))
    with httpx.Client(base_url=url.rstrip("/"), timeout=60.0) as client:
        query: dict[str, Any] = {
            "query": '{__name__=~"rollbook_.+",metric!=""}',
            "start": start_s,
            "end": end_s,
            "step": stride_s,
        }
        series = _query(client, "/api/v1/query_range", query).get("result", [])
        if not series:
            raise DataError(
                f"the Prometheus server at {url} has no readings of rollbook of the last {hours:g} hours",
                "check that it scrapes the run's endpoint (observe.prometheus_port), or give --hours",
            )
        newest = max(series, key=lambda s: float(s["values"][-1][0]))["metric"].get("run")
        of_run = [s for s in series if s["metric"].get("run") == newest]
        # All hours at once are coarse; a run that fills few of them is asked for again, as finely as can be.
        begin_s = min(float(s["values"][0][0]) for s in of_run) - stride_s
        until_s = min(max(float(s["values"][-1][0]) for s in of_run) + stride_s, end_s)
        finer_s = max(1.0, (until_s - begin_s) / (MAX_POINTS - 1))
        if finer_s <= 0.5 * stride_s:
            again = {**query, "start": begin_s, "end": until_s, "step": finer_s}
            again["query"] = f'{{__name__=~"rollbook_.+",metric!="",run={json.dumps(newest or "")}}}'
            of_run = _query(client, "/api/v1/query_range", again).get("result", []) or of_run
    others = {str(s["metric"].get("run")) for s in series} - {str(newest)}
    if others:
        yield Event(
            kind="damaged", text=f"the server also has runs {', '.join(sorted(others))}: this is {newest}"
        )
    clock = next((s["values"] for s in of_run if s["metric"]["metric"] == STEP_METRIC), None)
    times = (
        [float(t) for t, _ in clock] if clock else sorted({float(t) for s in of_run for t, _ in s["values"]})
    )
    steps = [int(float(v)) for _, v in clock] if clock else list(range(len(times)))
    rows: dict[int, dict[str, float]] = {}
    at_s: dict[int, float] = {}
    for one in of_run:
        for t, value in one["values"]:
            i = bisect.bisect_right(times, float(t)) - 1
            parsed = number(value)
            if i >= 0 and parsed is not None:
                rows.setdefault(steps[i], {})[one["metric"]["metric"]] = (
                    parsed  # the last scrape of a step stands
                )
                at_s[steps[i]] = max(at_s.get(steps[i], 0.0), float(t))
    for step in sorted(rows):
        yield Row(step=step, data=rows[step], at_s=at_s[step])


def _query(client: httpx.Client, path: str, params: dict[str, Any]) -> dict[str, Any]:
    try:
        response = client.get(path, params=params)
        body = response.json()
    except httpx.HTTPError as error:
        raise DataError(
            f"no answer of a Prometheus server at {client.base_url} ({error})", "check the URL"
        ) from error
    except ValueError as error:
        raise DataError(
            f"what answers at {client.base_url} is no Prometheus server",
            "give the server that scrapes the run, or the run directory: a run's own endpoint knows its newest step",
        ) from error
    if (
        not isinstance(body, dict)
        or body.get("status") != "success"
        or not isinstance(body.get("data"), dict)
    ):
        raise DataError(
            f"the Prometheus server at {client.base_url} answered {response.status_code}: {body}",
            "check the URL and the server's log",
        )
    return dict(body["data"])
