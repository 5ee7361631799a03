"""`rollbook alerts`: alert rules and a dashboard for what a run's Prometheus endpoint serves."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write to.")] = Path("alerts"),
    max_staleness_steps: Annotated[
        int, typer.Option(help="The job's buffer.max_staleness_steps.", min=0)
    ] = 1,
    max_logprob_gap_nats: Annotated[
        float, typer.Option(help="Mean gap that wakes somebody: 0.05 suits bf16, 0.001 fp32.")
    ] = 0.05,
    max_failed_frac: Annotated[
        float, typer.Option(help="Share of failed trajectories that wakes somebody, 0 to 1.")
    ] = 0.05,
) -> None:
    """Write Prometheus alert rules and a Grafana dashboard for rollbook's metrics.

    Example: rollbook alerts -o monitoring
    """
    from rollbook.errors import ConfigError
    from rollbook.observe import grafana
    from rollbook.observe.alerts import Thresholds, to_rules
    from rollbook.observe.run_dir import storage_error

    if not 0.0 < max_logprob_gap_nats < math.inf:
        raise ConfigError(
            f"--max-logprob-gap-nats is {max_logprob_gap_nats}",
            "give a number above 0: 0.05 suits bf16, 0.001 fp32",
        )
    if not 0.0 <= max_failed_frac < 1.0:
        raise ConfigError(
            f"--max-failed-frac is {max_failed_frac}", "give a share from 0 to below 1: 0.05 is usual"
        )
    thresholds = Thresholds(
        max_staleness_steps=max_staleness_steps,
        max_logprob_gap_nats=max_logprob_gap_nats,
        max_failed_frac=max_failed_frac,
    )
    for name, text in (
        ("rollbook.rules.yml", to_rules(thresholds)),
        ("rollbook.dashboard.json", grafana.to_json()),
    ):
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(text)
        except OSError as error:
            raise storage_error(out / name, error) from error
        print(out / name)
    print("set observe.prometheus_port in the config to serve what they read", file=sys.stderr)
