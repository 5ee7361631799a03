"""What the live view of a run knows of it: the last readings, the step in progress, and what is left."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollbook.observe.catalogue import STAGES
from rollbook.observe.numbers import count, seconds
from rollbook.observe.recorder import Event

NUM_SPARK_STEPS = 400
"""Mean rewards that are kept of a data source."""


@dataclass(slots=True)
class Progress:
    """What the view knows: the last readings and the step in progress."""

    num_steps: int | None = None
    first_step: int | None = None
    step: int | None = None
    num_done: int = 0
    data: dict[str, float] = field(default_factory=dict)
    """Last reading of every metric."""
    rewards: dict[str, deque[float]] = field(default_factory=dict)
    """Data source -> mean reward, a value a step."""
    open_spans: dict[str, float] = field(default_factory=dict)
    """Span name -> monotonic start, of the step and the stages in progress."""
    started_mono_s: float = 0.0
    steps_began_mono_s: float | None = None
    first_readings: dict[str, float] = field(default_factory=dict)
    warmup: dict[str, float] = field(default_factory=dict)
    """Last readings of the supervised warm-up."""
    num_warmup_updates: int = 0
    warmup_began_mono_s: float = 0.0
    warmup_at_mono_s: float = 0.0
    """Of its last update."""
    measuring: str = ""
    """Which part of the calibration is under way."""

    def take_event(self, event: Event) -> None:
        kind, name, mono_s = event["kind"], str(event.get("name", "")), number_of(event["mono_s"])
        if kind == "span_open":
            self.open_spans[name] = mono_s
            if name == "warmup":
                self.warmup_began_mono_s = mono_s
            if name == "step":
                step = event.get("step")
                self.step = step if isinstance(step, int) else None
                if self.first_step is None:
                    self.first_step, self.steps_began_mono_s = self.step, mono_s
        elif kind == "span":
            self.open_spans.pop(name, None)
        elif kind in ("run_started", "run_resumed"):
            self.started_mono_s = mono_s
        elif kind == "warmup":
            self.warmup |= {"update": number_of(event.get("update")), "loss": number_of(event.get("loss"))}
            self.num_warmup_updates = int(number_of(event.get("num_updates")))
            self.warmup_at_mono_s = mono_s
        elif kind == "measuring":
            self.measuring = f"{event.get('part')}/{event.get('num_parts')} {event.get('what')}"
        elif kind == "warmup_check" and isinstance(exact := event.get("exact_match"), list):
            self.warmup["held-out"] = min(map(number_of, exact), default=0.0)

    def take_step(self, step: int, data: Mapping[str, float]) -> None:
        self.data.update(data)
        for name, value in data.items():
            self.first_readings.setdefault(name, value)
            match = re.fullmatch(r"reward/(.+)/mean", name)
            if match:
                self.rewards.setdefault(match[1], deque(maxlen=NUM_SPARK_STEPS)).append(value)
        if "timing_s/step" in data:
            self.step = step
            self.num_done += 1

    def warmup_line(self, now_mono_s: float) -> str:
        """Where the warm-up is, and how long it may still take: it ends earlier once enough is answered."""
        update, most = self.warmup.get("update", 0.0), self.num_warmup_updates
        line = f"warm-up  update {count(update)}" + (f"/{most}" if most else "")
        line += "".join(
            f"  {name} {count(round(value, 3))}" for name, value in self.warmup.items() if name != "update"
        )
        if 0 < update < most and "warmup" in self.open_spans:
            took_s = self.warmup_at_mono_s - self.warmup_began_mono_s
            left_s = took_s / update * (most - update) - (now_mono_s - self.warmup_at_mono_s)
            line += f"  at most {seconds(max(left_s, 0.0))} left"
        return line

    def stages(self) -> list[tuple[str, float | None, float | None]]:
        """(span name, measured seconds, expected seconds) of the last step, in the order of a step."""
        rows = []
        for name, suffix in STAGES.items():
            measured = self.data.get(f"timing_s/{suffix}")
            if measured is not None or name in self.open_spans:
                rows.append((name, measured, self.data.get(f"expected_s/{suffix}")))
        return rows

    def remaining_s(self, now_mono_s: float) -> float | None:
        if self.num_steps is None or not self.num_done or self.steps_began_mono_s is None:
            return None
        assert self.first_step is not None
        num_left = max(0, self.num_steps - self.first_step - self.num_done)
        return (now_mono_s - self.steps_began_mono_s) / self.num_done * num_left


def number_of(value: object) -> float:
    """A field of an event as a number; 0 where it is none."""
    return float(value) if isinstance(value, (int, float)) else 0.0
