"""The Prometheus endpoint of a run: the last reading of every metric, on loopback unless the config says else.

rollbook_timing_s_gen{run="demo", metric="timing_s/gen"} 1.9
rollbook_reward_by_source_mean{run="demo", source="gsm8k", metric="reward/gsm8k/mean"} 0.41
rollbook_last_step_time_seconds{run="demo"} 1.7e9
rollbook_run_num_steps{run="demo"} 120
rollbook_events_total{run="demo", kind="finding"} 2
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollbook.errors import ConfigError
from rollbook.observe import catalogue
from rollbook.observe.clock import Clock, SystemClock
from rollbook.observe.recorder import Event

PREFIX = "rollbook_"


def exported_name(name: str) -> str:
    """A catalogue name (family placeholders included) as a Prometheus metric name.

    >>> exported_name("timing_s/gen"), exported_name("reward/{source}/mean")
    ('rollbook_timing_s_gen', 'rollbook_reward_by_source_mean')
    """
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]", "_", re.sub(r"\{(\w+)\}", r"by_\1", name))


class PrometheusSink(Collector):
    """Serves the last readings over HTTP; a reading stands until a later one of the same metric.

    A sum is of its step: once a later step brings none, it is gone, so that an alert on a failed publication ends.
    So is the last finite reading of a metric that became NaN or infinite.

    Args:
        run: value of the label `run`.
        port: 0 takes any free port; see `url`.
    Raises:
        ConfigError: the port cannot be opened.
    """

    def __init__(
        self,
        run: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        num_steps: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._run = run
        self._num_steps = num_steps
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._readings: dict[str, float] = {}
        self._num_events: Counter[str] = Counter()
        self._last_step_at_s: float | None = None
        self._started_at_s = self._clock.unix_s()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise ConfigError(
                f"observe.prometheus_port {port} on {host} cannot be opened: {error.strerror}",
                "choose another port, or 0 for any free one",
            ) from error
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def on_event(self, event: Event) -> None:
        with self._lock:
            self._num_events[str(event["kind"])] += 1
            if isinstance(nonfinite := event.get("metrics"), list) and event["kind"] == "nonfinite":
                for reading in nonfinite:
                    self._readings.pop(str(reading).rpartition("=")[0], None)

    def on_step(self, step: int, data: Mapping[str, float]) -> None:
        with self._lock:
            if "timing_s/step" in data:  # a whole step; validation may come in a line of its own
                self._last_step_at_s = self._clock.unix_s()
                self._readings = {name: v for name, v in self._readings.items() if not _is_of_a_step(name)}
            self._readings.update(data)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Called by the client library for each scrape."""
        with self._lock:
            readings, num_events = dict(self._readings), dict(self._num_events)
            last_step_at_s = self._last_step_at_s
        families: dict[str, GaugeMetricFamily] = {}
        for name, value in readings.items():
            metric, placeholders = catalogue.match(name) or (None, {})
            exported = exported_name(metric.name if metric else name)
            labels = {"run": self._run, **placeholders, "metric": name}
            help_text = f"{metric.meaning} [{metric.unit}]" if metric else "not in the catalogue"
            family = families.setdefault(
                exported, GaugeMetricFamily(exported, help_text, labels=list(labels))
            )
            family.add_metric(list(labels.values()), value)
        yield from families.values()
        for exported, help_text, number in (
            ("last_step_time_seconds", "Unix time at which the last step ended.", last_step_at_s),
            ("run_start_time_seconds", "Unix time at which the process began to report.", self._started_at_s),
            ("run_num_steps", "Steps of the whole run.", self._num_steps),
        ):
            if number is not None:
                gauge = GaugeMetricFamily(PREFIX + exported, help_text, labels=["run"])
                gauge.add_metric([self._run], number)
                yield gauge
        events = CounterMetricFamily(
            PREFIX + "events", "Lines of events.jsonl, by kind.", labels=["run", "kind"]
        )
        for kind, num in num_events.items():
            events.add_metric([self._run, kind], num)
        yield events


def _is_of_a_step(name: str) -> bool:
    """Whether a reading says nothing once the next step has ended: what was summed in it, or a share of its seconds."""
    metric = catalogue.lookup(name)
    return metric is not None and (
        metric.reduction == "sum" or metric.denominator.startswith("timing_s/step")
    )
