"""The recorder: the one object a run reports to. It owns the run directory and feeds the sinks.

    with recorder.step(step):                    # one line of metrics.jsonl, written when the step ends
        with recorder.span("rollout", expected_s=41.0) as span:  # a stage: timing_s/gen, expected_s/gen
            ...
            span.set(tokens=120_000)
        recorder.metrics({"critic/rewards/mean": Ratio(31.0, 64)})
        recorder.event("publication", weight_version=3, duration_s=0.8)
        recorder.trajectories(step, trajectories)

Spans directly under the step are its stages (`catalogue.STAGES` names their metrics). Metrics may be
reported from any thread or task; what arrives between steps goes into the next one. Nothing here sleeps.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import shutil
import threading
import time
import warnings
from asyncio import current_task
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

from rollbook.errors import DataError, RunError, nearest_name
from rollbook.observe import catalogue
from rollbook.observe.clock import Clock, SystemClock
from rollbook.observe.core_waits import CoreWaits, longest_wait_s
from rollbook.observe.host_memory import tree_bytes
from rollbook.observe.run_dir import RunDir, read_json_lines
from rollbook.observe.spans import Attr, Span, covered_s, current_span
from rollbook.observe.values import Last, Ratio, Total, Value, Values, merge
from rollbook.observe.whole_step import Work, whole_step
from rollbook.types import Bools, Trajectory

Event = Mapping[str, object]
"""One line of events.jsonl: "kind", "at_s" (unix seconds), "mono_s" (monotonic), and the kind's fields."""

Severity = Literal["info", "warning", "error"]

MAX_SINK_FAILURES = 3
"""Failures in a row after which a sink is left out of the rest of the run; an event says so."""


class Sink(Protocol):
    """Where readings also go: the terminal, Prometheus, TensorBoard, a hosted tracker."""

    def on_event(self, event: Event) -> None:
        """Every line of events.jsonl, as it is written."""

    def on_step(self, step: int, data: Mapping[str, float]) -> None:
        """Every line of metrics.jsonl, as it is written; readings that are not finite are left out."""

    def close(self) -> None: ...


class Recorder:
    """Owns one run directory until `close`; safe to call from any thread or task.

    Args:
        run_dir: the folder; see `RunDir.open` for what `resume` means and which errors it raises.
        sinks: told of every event and every step. A failing sink never stops the run. A function makes
            them once the run begins.
        view: a sink that is told from the start, also of a run that never begins.
        clock: time, passed in.
        resume: take up the run that is there.
        strict: an unknown metric name is an error (tests) instead of a warning and a counter.
        num_gpus: all GPUs of the job (0: CPUs only), the denominator of `perf/throughput`.
        decode: text of token ids, for the page; each new id is written once to tokens.jsonl.
        config_toml: the resolved config, written beside the readings.
        is_held: write nothing before `accept`. A run that cannot start, or a resume that is refused, then leaves the
            disk as it was.
    """

    def __init__(
        self,
        run_dir: Path | str,
        sinks: Sequence[Sink] | Callable[[Path], Sequence[Sink]] = (),
        *,
        clock: Clock | None = None,
        resume: bool = False,
        strict: bool = False,
        num_gpus: int = 0,
        decode: Callable[[Sequence[int]], str] | None = None,
        view: Sink | None = None,
        config_toml: str = "",
        is_held: bool = False,
    ) -> None:
        self.run_dir = RunDir.claim(Path(run_dir), resume=resume)
        self.sinks: list[Sink] = [] if view is None else [view]
        self.clock = clock or SystemClock()
        self.strict = strict
        self.num_gpus = num_gpus
        self.decode = decode
        """May be set once the tokenizer is there."""
        self._make_sinks = sinks
        self._resume = resume
        self._config_toml = config_toml
        self._held_events: list[Event] | None = []
        """Events before `accept`; None afterwards."""
        self._lock = threading.RLock()
        self._values: Values = {}
        self._step_span: Span | None = None
        self._stages: list[Span] = []
        self._work: Work | None = None
        self._core_waits = CoreWaits()
        self._span_ids = itertools.count(1)
        self._token_ids_written: set[int] = set()
        self._sink_failures: dict[tuple[int, str], int] = {}
        self._closed = False
        self.event("run_resumed" if resume else "run_started")
        if not is_held:
            try:
                self.accept()
            except BaseException:
                self.close()
                raise

    @property
    def is_accepted(self) -> bool:
        """The run began: something of it is on disk."""
        return self._held_events is None

    def accept(self) -> None:
        """The run can start: from here on it is on disk, with what was said so far. A second call does nothing.

        Raises:
            RunError: the run directory cannot be written.
            ConfigError: a sink cannot be opened; the run has not begun.
        """
        if self._held_events is None:
            return
        made = list(self._make_sinks(self.path) if callable(self._make_sinks) else self._make_sinks)
        try:
            self.run_dir.begin()
            if self._config_toml:
                self.run_dir.write_config(self._config_toml)
        except BaseException:
            for sink in made:
                sink.close()
            raise
        with self._lock:
            self.sinks += made
            held, self._held_events = self._held_events, None
            for event in held:
                self.run_dir.events.append(_to_json(event))
                self._tell("on_event", functools.partial(_pass_on, event), sinks=made)
            for file, fragment in self.run_dir.repaired.items():
                self.event("repair", file=file, fragment=fragment)
        if self._resume:
            known = (line.get("id") for line in read_json_lines(self.run_dir.tokens.path))
            self._token_ids_written = {token_id for token_id in known if isinstance(token_id, int)}

    @property
    def path(self) -> Path:
        return self.run_dir.path

    # -- spans

    @contextmanager
    def step(self, step: int) -> Iterator[Span]:
        """One turn of the main loop. Its metrics are written when the block ends without an error."""
        with self._lock:
            if self._step_span is not None:
                raise RunError(
                    f"step {step} begins inside step {self._step_span.step}",
                    "leave the earlier step's block first",
                )
            span = self._open("step", step=step, parent=None)
            self._step_span, self._stages, self._work = span, [], None
            self._core_waits.look()
            waited, cpu_s = self._core_waits.read(), time.process_time()
        token = current_span.set(span)
        try:
            yield span
        except BaseException as error:
            with self._lock:
                self._end(span, error)
                self._step_span = None
                values, self._values = self._values, {}  # a retried step must not count them twice
                readings = {name: value.result() for name, value in values.items()}
                self.event("step_failed", step=step, error=_in_words(error), metrics=readings)
            raise
        else:
            with self._lock:
                span.core_wait_s = longest_wait_s(waited, self._core_waits.read())
                self._end(span, None)
                self._step_span = None
                self._derive(span, cpu_s=time.process_time() - cpu_s)
                values, self._values = self._values, {}
                self._write_metrics(step, values)
        finally:
            current_span.reset(token)

    @contextmanager
    def span(
        self, name: str, expected_s: float | None = None, expected_bytes: int | None = None, **attrs: Attr
    ) -> Iterator[Span]:
        """A timed interval. Directly under the step it is a stage, and its name must stand in `STAGES`."""
        parent = current_span.get()
        if parent is not None and parent.duration_s is not None:
            parent = None  # inherited by a task that outlived the step it was started in
        is_stage = parent is not None and parent is self._step_span
        if is_stage and name not in catalogue.STAGES:
            self._unknown("stage", name, catalogue.STAGES)
            is_stage = False
        with self._lock:
            span = self._open(name, step=self._step_span.step if self._step_span else None, parent=parent)
            span.expected_s, span.expected_bytes = expected_s, expected_bytes
            span.attrs.update(attrs)
            waited = self._core_waits.read() if is_stage else {}
            if is_stage or (parent is None and self._step_span is None):
                self._announce(span)
        token = current_span.set(span)
        try:
            yield span
        except BaseException as error:
            self._end(span, error)
            raise
        else:
            if is_stage:
                with self._lock:
                    span.core_wait_s = longest_wait_s(waited, self._core_waits.read())
            self._end(span, None)
        finally:
            current_span.reset(token)
            if is_stage:
                with self._lock:
                    self._stages.append(span)

    def _open(self, name: str, *, step: int | None, parent: Span | None) -> Span:
        span = Span(
            name=name,
            span_id=next(self._span_ids),
            parent=parent,
            step=step,
            track=_track(),
            at_s=self.clock.unix_s(),
            mono_s=self.clock.mono_s(),
        )
        if name == "step":
            self._announce(span)
        return span

    def _announce(self, span: Span) -> None:
        """Say that a step, a stage or a phase outside the steps began: a hung run shows what it was in."""
        fields: dict[str, object] = {"name": span.name, "span_id": span.span_id, "step": span.step}
        if span.expected_s is not None:
            fields["expected_s"] = span.expected_s
        self._write_event("span_open", fields, at_s=span.at_s, mono_s=span.mono_s)

    def _end(self, span: Span, error: BaseException | None) -> None:
        span.duration_s = self.clock.mono_s() - span.mono_s
        if error is not None:
            span.error = _in_words(error)
        self._write_event("span", span.fields(), at_s=span.at_s, mono_s=span.mono_s)

    def _derive(self, step_span: Span, *, cpu_s: float) -> None:
        """Seconds, expectations and rates of each stage, from the step's spans; and the host's memory and disk."""
        seconds: Values = {}
        for stage in self._stages:
            metric = catalogue.STAGES[stage.name]
            duration_s = stage.duration_s or 0.0
            merge(seconds, {f"timing_s/{metric}": Total(duration_s)})
            if stage.expected_s is not None:
                merge(seconds, {f"expected_s/{metric}": Total(stage.expected_s)})
            if stage.core_wait_s is not None:
                merge(seconds, {f"core_wait_s/{metric}": Total(stage.core_wait_s)})
            if stage.num_tokens is not None and duration_s > 0:
                merge(seconds, {f"perf/tokens_per_s/{metric}": Ratio(stage.num_tokens, duration_s)})
                if self.num_gpus:
                    rate = Ratio(stage.num_tokens, duration_s * self.num_gpus)
                    merge(seconds, {f"perf/tokens_per_s_per_gpu/{metric}": rate})
        of_step = [s for s in self._stages if s.name not in catalogue.STAGES_OUTSIDE_STEP]
        outside = [s for s in self._stages if s.name in catalogue.STAGES_OUTSIDE_STEP]
        step_s = (step_span.duration_s or 0.0) - covered_s(outside)
        seconds["timing_s/step"] = Total(step_s)
        seconds["timing_s/other"] = Total(max(0.0, step_s - covered_s(of_step)))
        seconds["perf/time_per_step"] = Total(step_s)
        if step_span.core_wait_s is not None and step_s > 0:
            seconds["core_wait_s/step"] = Total(step_span.core_wait_s)
            cores = len(os.sched_getaffinity(0))
            seconds["host/own_core_frac"] = Ratio(cpu_s, (step_span.duration_s or 0.0) * cores)
        if step_span.expected_s is not None:
            seconds["expected_s/step"] = Total(step_span.expected_s)
        num_tokens = self._values.get("perf/total_num_tokens")
        if num_tokens is not None and self.num_gpus and step_s > 0:
            seconds["perf/throughput"] = Ratio(num_tokens.result(), step_s * self.num_gpus)
        if self._work is not None:
            stage_s: dict[str, float] = {}
            for stage in of_step:
                stage_s[stage.name] = stage_s.get(stage.name, 0.0) + (stage.duration_s or 0.0)
            merge(seconds, whole_step(self._work, stage_s, step_s))
        if (held := tree_bytes()) is not None:
            seconds["perf/cpu_memory_used_gb"] = Last(held / 2**30)
        seconds["host/disk_free_bytes"] = Last(float(shutil.disk_usage(self.path).free))
        seconds["training/global_step"] = Last(float(step_span.step or 0))
        merge(self._values, seconds)

    def seconds_of(self, stages: Collection[str]) -> float:
        """What these stages of the current step took so far."""
        with self._lock:
            return sum(stage.duration_s or 0.0 for stage in self._stages if stage.name in stages)

    def work(self, work: Work) -> None:
        """What the current step computed: with its seconds it gives `perf/mfu/step` and its waterfall."""
        with self._lock:
            self._work = work

    # -- metrics

    def metrics(self, values: Mapping[str, Value] | Mapping[str, float], *, step: int | None = None) -> None:
        """Add readings to the current step, merged by kind; a bare number is a gauge (the later one stands).

        With `step`, write them at once as a line of their own (validation before training, or after it).
        Raises DataError in strict mode for a name that the catalogue does not know.
        """
        known: Values = {}
        for name, value in values.items():
            if catalogue.lookup(name) is None:
                self._unknown("metric", name, catalogue.names())
            known[name] = value if isinstance(value, Value) else Last(float(value))
        with self._lock:
            if step is None:
                merge(self._values, known)
            else:
                self._write_metrics(step, known)

    def _write_metrics(self, step: int, values: Values) -> None:
        data: dict[str, float | None] = {}
        nonfinite: list[str] = []
        for name in sorted(values):
            value = values[name]
            if isinstance(value, Ratio) and value.denominator == 0 and value.numerator == 0:
                continue  # nothing to report is not a number
            number = value.result()
            if math.isfinite(number):
                data[name] = number
            else:
                data[name] = None
                nonfinite.append(f"{name}={number}")
        if nonfinite:
            data["observe/nonfinite_metrics"] = float(len(nonfinite))
            self.event("nonfinite", step=step, metrics=nonfinite)
        self.run_dir.metrics.append(json.dumps({"step": step, "data": data}))
        finite = {name: number for name, number in data.items() if number is not None}
        self._tell("on_step", lambda sink: sink.on_step(step, finite))

    def _unknown(
        self, what: str, name: str, known: Iterator[str] | Mapping[str, str] | Sequence[str]
    ) -> None:
        if self.strict:
            raise DataError(f"{what} {name!r} is not in the catalogue", nearest_name(name, known))
        warnings.warn(f"{what} {name!r} is not in the catalogue (observe/catalogue.py)", stacklevel=3)
        with self._lock:
            merge(self._values, {"observe/unknown_names": Total(1)})

    # -- events

    def event(self, kind: str, **fields: object) -> None:
        """Write one line to events.jsonl now. `docs/metrics.md` lists the kinds and their fields."""
        self._write_event(kind, fields, at_s=self.clock.unix_s(), mono_s=self.clock.mono_s())

    def finding(
        self,
        rule: str,
        summary: str,
        *,
        remedy: str,
        severity: Severity = "warning",
        evidence: Mapping[str, object] | None = None,
        cost_s: float | None = None,
    ) -> None:
        """Record a diagnosis made during the run: what is wrong, on what evidence, and what to do."""
        fields: dict[str, object] = {"rule": rule, "summary": summary, "remedy": remedy, "severity": severity}
        if evidence:
            fields["evidence"] = dict(evidence)
        if cost_s is not None:
            fields["cost_s"] = cost_s
        self.event("finding", **fields)

    def _write_event(self, kind: str, fields: Mapping[str, object], *, at_s: float, mono_s: float) -> None:
        event: dict[str, object] = {"kind": kind, "at_s": round(at_s, 6), "mono_s": round(mono_s, 6)}
        step_span = self._step_span
        if step_span is not None and "step" not in fields:
            event["step"] = step_span.step
        event.update(fields)
        with self._lock:
            if self._held_events is not None:
                self._held_events.append(event)
            else:
                self.run_dir.events.append(_to_json(event))
        self._tell("on_event", lambda sink: sink.on_event(event))

    # -- trajectories

    def trajectories(
        self,
        step: int,
        trajectories: Sequence[Trajectory],
        *,
        loss_masks: Mapping[str, Bools] | None = None,
    ) -> Path:
        """Write `trajectories/step_N.parquet`, whole or not at all.

        Args:
            loss_masks: trajectory id -> [n] bool over `Trajectory.token_ids()`; absent ones stay null.
        """
        from rollbook.observe.trajectories import write_trajectories

        path = self.run_dir.trajectories_path(step)
        write_trajectories(path, step, trajectories, loss_masks or {})
        self.write_texts(trajectories)
        return path

    def write_texts(self, trajectories: Sequence[Trajectory]) -> None:
        """Texts of the tokens that none before had, to tokens.jsonl."""
        import numpy as np

        if self.decode is None:
            return
        seen = {i for trajectory in trajectories for i in np.unique(trajectory.token_ids()).tolist()}
        with self._lock:
            new = sorted(seen - self._token_ids_written)
            if new:
                lines = [json.dumps({"id": i, "text": self.decode([i])}, ensure_ascii=False) for i in new]
                self.run_dir.tokens.append("\n".join(lines))
                self._token_ids_written.update(new)

    # -- sinks

    def _tell(
        self, method: str, call: Callable[[Sink], None], *, sinks: Sequence[Sink] | None = None
    ) -> None:
        for sink in list(self.sinks if sinks is None else sinks):
            try:
                call(sink)
            except Exception as error:  # border: a tracker that is down must not stop the run
                failures = self._sink_failures.get((id(sink), method), 0) + 1
                self._sink_failures[id(sink), method] = failures
                gives_up = failures >= MAX_SINK_FAILURES
                if gives_up:
                    self.sinks.remove(sink)
                name = type(sink).__name__
                warnings.warn(f"{name} failed ({_in_words(error)})", stacklevel=2)
                with self._lock:
                    merge(self._values, {"observe/sink_failures": Total(1)})
                if failures == 1 or gives_up:
                    self.event("sink_failed", sink=name, error=_in_words(error), left_out=gives_up)
            else:
                self._sink_failures.pop((id(sink), method), None)

    def close(self) -> None:
        """Say that the run ended, close the sinks and release the directory. A second call does nothing.

        A run that never began leaves no trace."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._core_waits.close()
            try:
                if self.is_accepted:
                    self.event("run_ended", unwritten_metrics=sorted(self._values))
                self._tell("close", lambda sink: sink.close())
            finally:
                if self.is_accepted:
                    self.run_dir.close()
                else:
                    self.run_dir.abandon()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _pass_on(event: Event, sink: Sink) -> None:
    sink.on_event(event)


def _track() -> str:
    thread = threading.current_thread().name
    try:
        task = current_task()
    except RuntimeError:
        return thread
    return f"{thread}/{task.get_name()}" if task else thread


def _in_words(error: BaseException) -> str:
    what = error.what if isinstance(error, RunError) else str(error)
    return f"{type(error).__name__}: {what}" if what else type(error).__name__


def _to_json(event: Mapping[str, object]) -> str:
    try:
        return json.dumps(event, default=_jsonable, allow_nan=False)
    except ValueError:  # NaN and infinity are not JSON
        return json.dumps(_without_nonfinite(json.loads(json.dumps(event, default=_jsonable))))


def _without_nonfinite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nonfinite(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_without_nonfinite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _jsonable(value: object) -> object:
    """Numpy scalars and arrays, paths and anything else an event may carry."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value)
