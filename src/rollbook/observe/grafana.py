"""The Grafana dashboard, generated: one screen first, then stages, policy, engines, memory and environments.

reward by source | version per replica | logprob gap | staleness, length and sync seconds
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from rollbook.observe import catalogue
from rollbook.observe.prometheus import exported_name

SCHEMA_VERSION = 39
UNITS = {"s": "s", "bytes": "bytes", "frac": "percentunit", "tokens/s": "short", "GiB": "gbytes"}
"""Unit of the catalogue -> unit of Grafana."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One time series panel: metrics of the catalogue (families with their placeholders)."""

    title: str
    metrics: tuple[str, ...]
    width: int = 6
    """Of 24 columns."""


ROWS: list[tuple[str, list[Panel]]] = [
    (
        "One screen",
        [
            Panel(title="Reward by source", metrics=("reward/{source}/mean", "val/{source}/exact_match")),
            Panel(title="Weight version per replica", metrics=("replica/{replica_id}/weight_version",)),
            Panel(title="Logprob gap", metrics=("training/logprob_gap/mean", "training/logprob_gap/p99")),
            Panel(
                title="Staleness",
                metrics=(
                    "training/off_policy/trajectory_staleness_worst/mean",
                    "training/off_policy/trajectory_staleness_worst/max",
                ),
                width=2,
            ),
            Panel(title="Length", metrics=("response_length/mean", "response_length/p99"), width=2),
            Panel(title="Sync", metrics=("timing_s/update_weights", "expected_s/update_weights"), width=2),
        ],
    ),
    (
        "Stages",
        [
            Panel(title="Step: measured and planned", metrics=("timing_s/step", "expected_s/step")),
            Panel(
                title="Seconds of the stages",
                metrics=(*(f"timing_s/{suffix}" for suffix in catalogue.STAGES.values()), "timing_s/other"),
                width=12,
            ),
            Panel(title="Tokens per second", metrics=("perf/tokens_per_s/{stage}", "perf/throughput")),
            Panel(
                title="Whole-step MFU and where the rest went",
                metrics=("perf/mfu/step", "waterfall/{loss}"),
                width=12,
            ),
            Panel(title="Idle", metrics=("idle_frac/{side}", "replica/{replica_id}/idle_frac"), width=12),
        ],
    ),
    (
        "Policy",
        [
            Panel(title="Share of zeros by source", metrics=("reward/{source}/zero_frac",)),
            Panel(title="Entropy and KL", metrics=("actor/entropy", "actor/ppo_kl", "actor/kl_loss")),
            Panel(title="Clipped tokens", metrics=("actor/pg_clipfrac", "actor/pg_clipfrac_lower")),
            Panel(title="Gradient norm", metrics=("actor/grad_norm", "critic/grad_norm")),
            Panel(
                title="Importance weights",
                metrics=("rollout_corr/rollout_is_mean", "rollout_corr/rollout_is_eff_sample_size"),
            ),
            Panel(title="Groups kept by the filters", metrics=("filter/kept_frac", "batch/effective_frac")),
            Panel(title="Truncated", metrics=("generated/clip_ratio", "response_length/clip_ratio")),
            Panel(title="Failures by kind", metrics=("failures/{kind}/num",)),
        ],
    ),
    (
        "Engines and weights",
        [
            Panel(title="Running sequences", metrics=("replica/{replica_id}/num_running",)),
            Panel(title="Tokens per second of a replica", metrics=("replica/{replica_id}/tokens_per_s",)),
            Panel(title="KV pool", metrics=("replica/{replica_id}/kv_used_frac",)),
            Panel(title="Preemptions", metrics=("replica/{replica_id}/num_preemptions",)),
            Panel(title="Tail", metrics=("rollout/tail_s",)),
            Panel(title="Published bytes", metrics=("sync/num_bytes",)),
            Panel(title="Failed publications", metrics=("sync/num_failed", "replica/num_quarantined")),
            Panel(title="Prefix hits", metrics=("rollout/prefix_hit_frac",)),
        ],
    ),
    (
        "Memory and buffer",
        [
            Panel(title="Reserved at a hand-over", metrics=("memory/{point}/reserved_bytes",)),
            Panel(title="Reserved and not used", metrics=("memory/{point}/fragmented_bytes",)),
            Panel(title="Host memory of the run", metrics=("perf/cpu_memory_used_gb",)),
            Panel(title="Buffer", metrics=("buffer/num_running", "buffer/num_finished", "buffer/capacity")),
            Panel(title="Evictions", metrics=("evicted/{reason}/num_groups",)),
        ],
    ),
    (
        "Environments",
        [
            Panel(title="Sandboxes", metrics=("env/num_active", "env/capacity")),
            Panel(title="Queue", metrics=("env/queue_depth",)),
            Panel(title="Seconds of a turn", metrics=("env/turn_s/mean", "env/turn_s/p99")),
            Panel(title="Time-outs and errors", metrics=("env/num_timeouts", "env/num_errors")),
        ],
    ),
]


def dashboard() -> dict[str, object]:
    """The dashboard as Grafana's JSON model; import it and choose the data source."""
    panels: list[dict[str, object]] = []
    y = 0
    for title, row in ROWS:
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": _at(0, y, 24, 1),
            }
        )
        y += 1
        x = 0
        for panel in row:
            if x + panel.width > 24:
                x, y = 0, y + 8
            panels.append(_timeseries(panel, len(panels) + 1, _at(x, y, panel.width, 8)))
            x += panel.width
        y += 8
    return {
        "title": "rollbook",
        "uid": "rollbook",
        "tags": ["rollbook"],
        "timezone": "browser",
        "schemaVersion": SCHEMA_VERSION,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "run",
                    "label": "Run",
                    "type": "query",
                    "datasource": _datasource(),
                    "query": f"label_values({exported_name('training/global_step')}, run)",
                    "refresh": 2,
                    "sort": 1,
                },
            ]
        },
        "panels": panels,
    }


def to_json() -> str:
    """The text of the dashboard file."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _timeseries(panel: Panel, panel_id: int, position: dict[str, int]) -> dict[str, object]:
    known = [metric for metric in (catalogue.lookup(name) for name in panel.metrics) if metric is not None]
    targets = [
        {
            "refId": chr(ord("A") + i),
            "datasource": _datasource(),
            "expr": f'{exported_name(name)}{{run="$run"}}',
            "legendFormat": "{{metric}}",
        }
        for i, name in enumerate(panel.metrics)
    ]
    return {
        "id": panel_id,
        "type": "timeseries",
        "title": panel.title,
        "description": " ".join(metric.meaning for metric in known),
        "datasource": _datasource(),
        "gridPos": position,
        "fieldConfig": {
            "defaults": {
                "unit": UNITS.get(known[0].unit, "short"),
                "custom": {"fillOpacity": 8, "lineWidth": 1},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": panel.width > 2}},
        "targets": targets,
    }


def _datasource() -> dict[str, str]:
    return {"type": "prometheus", "uid": "${datasource}"}


def _at(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}
