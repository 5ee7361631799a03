"""The recorder: what stands in metrics.jsonl and events.jsonl after a step."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import DataError, RunError
from rollbook.observe.clock import ManualClock
from rollbook.observe.recorder import Event, Recorder
from rollbook.observe.run_dir import read_json_lines
from rollbook.observe.values import Last, Peak, Ratio, Total


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def recorder(tmp_path: Path, clock: ManualClock) -> Iterator[Recorder]:
    with Recorder(tmp_path / "run", clock=clock, strict=True, num_gpus=4) as opened:
        yield opened


def metrics_of(recorder: Recorder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (recorder.path / "metrics.jsonl").read_text().splitlines()]


def events_of(recorder: Recorder, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_json_lines(recorder.path / "events.jsonl") if event["kind"] == kind]


def test_stage_seconds_stand_beside_their_expectation(recorder: Recorder, clock: ManualClock) -> None:
    with recorder.step(7) as step:
        step.set(expected_s=9.0)
        with recorder.span("rollout", expected_s=5.0) as span:
            with recorder.span("decode"):  # nested: an event, not a stage
                clock.advance(4.0)
            span.set(tokens=800, bytes=64)
        for _ in range(2):
            with recorder.span("train", expected_s=1.5):
                clock.advance(1.0)
        clock.advance(0.5)
    (line,) = metrics_of(recorder)
    assert line["step"] == 7
    data = line["data"]
    assert (data["timing_s/gen"], data["expected_s/gen"]) == (4.0, 5.0)
    assert (data["timing_s/update_actor"], data["expected_s/update_actor"]) == (2.0, 3.0)
    assert (data["timing_s/step"], data["expected_s/step"], data["timing_s/other"]) == (6.5, 9.0, 0.5)
    assert data["perf/tokens_per_s/gen"] == 200.0
    assert data["perf/tokens_per_s_per_gpu/gen"] == 50.0
    assert data["training/global_step"] == 7.0
    assert "timing_s/decode" not in data


def test_span_events_carry_parent_quantities_and_clocks(recorder: Recorder, clock: ManualClock) -> None:
    clock.advance(2.0)
    with recorder.step(0), recorder.span("sync", expected_s=3.0, expected_bytes=100, replica_id=1) as outer:
        outer.set(bytes=90, transport="disk")
        with recorder.span("bucket"):
            clock.advance(1.0)
    bucket, sync, step = events_of(recorder, "span")
    assert (bucket["name"], bucket["parent_id"]) == ("bucket", sync["span_id"])
    assert (sync["parent_id"], step["name"]) == (step["span_id"], "step")
    assert (sync["expected_s"], sync["duration_s"], sync["mono_s"]) == (3.0, 1.0, 2.0)
    assert (sync["bytes"], sync["expected_bytes"]) == (90, 100)
    assert sync["attrs"] == {"replica_id": 1, "transport": "disk"}
    assert sync["at_s"] == clock.epoch_s + 2.0
    assert [e["name"] for e in events_of(recorder, "span_open")] == ["step", "sync"]


def test_overlapping_stages_are_not_subtracted_twice(recorder: Recorder, clock: ManualClock) -> None:
    async def stage(name: str, ends: asyncio.Event) -> None:
        with recorder.span(name):
            await ends.wait()

    async def run() -> None:
        ends = asyncio.Event()
        with recorder.step(0):
            tasks = [asyncio.create_task(stage(name, ends)) for name in ("reward", "reference")]
            await asyncio.sleep(0)
            clock.advance(3.0)
            ends.set()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    data = metrics_of(recorder)[0]["data"]
    assert (data["timing_s/reward"], data["timing_s/ref"]) == (3.0, 3.0)
    assert (data["timing_s/step"], data["timing_s/other"]) == (3.0, 0.0)


def test_evaluation_is_not_part_of_the_step(recorder: Recorder, clock: ManualClock) -> None:
    with recorder.step(0):
        with recorder.span("train"):
            clock.advance(2.0)
        with recorder.span("eval"):
            clock.advance(10.0)
    data = metrics_of(recorder)[0]["data"]
    assert (data["timing_s/testing"], data["timing_s/step"], data["timing_s/other"]) == (10.0, 2.0, 0.0)


def test_a_task_that_outlives_its_step_reports_background_spans(
    recorder: Recorder, clock: ManualClock
) -> None:
    async def run() -> None:
        goes_on = asyncio.Event()

        async def generate() -> None:
            await goes_on.wait()
            with recorder.span("rollout"):
                clock.advance(5.0)

        with recorder.step(0):
            task = asyncio.create_task(generate(), name="generator")
            await asyncio.sleep(0)
        with recorder.step(1):
            goes_on.set()
            await task

    asyncio.run(run())
    first, second = metrics_of(recorder)
    assert "timing_s/gen" not in first["data"]
    assert "timing_s/gen" not in second["data"]
    (span,) = [e for e in events_of(recorder, "span") if e["name"] == "rollout"]
    assert span["track"] == "MainThread/generator"
    assert "parent_id" not in span


def test_readings_from_many_threads_merge_by_kind(recorder: Recorder) -> None:
    def report(loss: float, num_tokens: int) -> None:
        recorder.metrics(
            {
                "actor/entropy": Ratio(loss * num_tokens, num_tokens),
                "trainer/actor_updates": Total(1),
                "actor/ratio/max": Peak(loss),
            }
        )

    with recorder.step(0):
        threads = [threading.Thread(target=report, args=reading) for reading in ((1.0, 6), (3.0, 2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.metrics({"actor/lr": 1e-3})
        recorder.metrics({"actor/lr": Last(1e-4)})
    data = metrics_of(recorder)[0]["data"]
    assert data["actor/entropy"] == 1.5  # 6 tokens of 1 and 2 tokens of 3
    assert (data["trainer/actor_updates"], data["actor/ratio/max"], data["actor/lr"]) == (2.0, 3.0, 1e-4)


def test_readings_between_steps_go_into_the_next_one(recorder: Recorder) -> None:
    recorder.metrics({"failures/num": Total(2)})
    with recorder.step(0):
        recorder.metrics({"failures/num": Total(1)})
    with recorder.step(1):
        pass
    first, second = metrics_of(recorder)
    assert first["data"]["failures/num"] == 3.0
    assert "failures/num" not in second["data"]


def test_metrics_with_a_step_are_a_line_of_their_own(recorder: Recorder) -> None:
    recorder.metrics({"val/add/exact_match": Ratio(3, 4)}, step=0)
    assert metrics_of(recorder) == [{"step": 0, "data": {"val/add/exact_match": 0.75}}]


def test_nothing_to_report_is_left_out_and_nan_is_null_with_an_event(recorder: Recorder) -> None:
    with recorder.step(0):
        recorder.metrics({"reward/a/mean": Ratio(0, 0), "actor/loss": math.nan, "actor/ratio/max": math.inf})
    text = (recorder.path / "metrics.jsonl").read_text()
    data = json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))["data"]
    assert "reward/a/mean" not in data
    assert (data["actor/loss"], data["actor/ratio/max"], data["observe/nonfinite_metrics"]) == (
        None,
        None,
        2.0,
    )
    (event,) = events_of(recorder, "nonfinite")
    assert event["metrics"] == ["actor/loss=nan", "actor/ratio/max=inf"]


def test_unknown_metric_is_an_error_in_strict_mode(recorder: Recorder) -> None:
    with pytest.raises(DataError, match="'actor/entrpy' is not in the catalogue") as caught:
        recorder.metrics({"actor/entrpy": 1.0})
    assert "'actor/entropy'" in caught.value.remedy


def test_unknown_names_are_written_with_a_warning_and_counted_otherwise(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run", clock=ManualClock()) as recorder:
        with recorder.step(0):
            with pytest.warns(UserWarning, match="'mine/own'"):
                recorder.metrics({"mine/own": 1.0})
            with pytest.warns(UserWarning, match="stage 'nap'"), recorder.span("nap"):
                pass
        data = metrics_of(recorder)[0]["data"]
    assert (data["mine/own"], data["observe/unknown_names"]) == (1.0, 2.0)


def test_a_failed_step_writes_no_line_and_its_retry_counts_nothing_twice(
    recorder: Recorder, clock: ManualClock
) -> None:
    with pytest.raises(RunError), recorder.step(4):
        recorder.metrics({"failures/num": Total(5)})
        with recorder.span("sync"):
            clock.advance(1.0)
            raise RunError("bucket 3 is missing", "retry")
    with recorder.step(4):
        recorder.metrics({"failures/num": Total(1)})
    (line,) = metrics_of(recorder)
    assert line["data"]["failures/num"] == 1.0
    (failed,) = events_of(recorder, "step_failed")
    assert (failed["step"], failed["error"]) == (4, "RunError: bucket 3 is missing")
    assert failed["metrics"] == {"failures/num": 5.0}
    assert [e.get("error") for e in events_of(recorder, "span")] == [failed["error"], failed["error"], None]


def test_steps_do_not_nest(recorder: Recorder) -> None:
    with recorder.step(0), pytest.raises(RunError, match="step 1 begins inside step 0"), recorder.step(1):
        pass
    assert [line["step"] for line in metrics_of(recorder)] == [0]


def test_throughput_divides_by_all_gpus(recorder: Recorder, clock: ManualClock) -> None:
    with recorder.step(0):
        recorder.metrics({"perf/total_num_tokens": Total(8000)})
        clock.advance(2.0)
    assert metrics_of(recorder)[0]["data"]["perf/throughput"] == 1000.0


def test_events_accept_numpy_and_stay_json(recorder: Recorder) -> None:
    import numpy as np

    recorder.event("memory", point="train", allocated_bytes=np.int64(5), owners={"kv": 3}, ratio=math.nan)
    recorder.finding("stale", "too old", remedy="wait", evidence={"steps": np.array([1, 2])}, cost_s=3.5)
    (memory,) = events_of(recorder, "memory")
    assert (memory["allocated_bytes"], memory["owners"], memory["ratio"]) == (5, {"kv": 3}, None)
    (finding,) = events_of(recorder, "finding")
    assert (finding["severity"], finding["evidence"], finding["cost_s"]) == (
        "warning",
        {"steps": [1, 2]},
        3.5,
    )


class Listener:
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.kinds: list[str] = []
        self.is_closed = False

    def on_event(self, event: Event) -> None:
        self.kinds.append(str(event["kind"]))

    def on_step(self, step: int, data: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError("tracker is down")
        self.steps.append((step, dict(data)))

    def close(self) -> None:
        self.is_closed = True


def test_sinks_hear_finite_readings_and_every_event(tmp_path: Path) -> None:
    sink = Listener()
    with Recorder(tmp_path / "run", [sink], clock=ManualClock()) as recorder, recorder.step(0):
        recorder.metrics({"actor/lr": 1.0, "actor/loss": math.nan})
    assert sink.steps[0][1]["actor/lr"] == 1.0
    assert "actor/loss" not in sink.steps[0][1]
    assert sink.kinds == ["run_started", "span_open", "span", "nonfinite", "run_ended"]
    assert sink.is_closed


def test_a_failing_sink_never_stops_the_run_and_is_left_out_after_three_failures(tmp_path: Path) -> None:
    broken, good = Listener(fails=True), Listener()
    with Recorder(tmp_path / "run", [broken, good], clock=ManualClock()) as recorder:
        for step in range(5):
            if step < 3:
                with pytest.warns(UserWarning, match="Listener failed"), recorder.step(step):
                    pass
            else:
                with recorder.step(step):
                    pass
        failures = events_of(recorder, "sink_failed")
    assert len(good.steps) == 5
    assert [e["left_out"] for e in failures] == [False, True]
    assert sum(data.get("observe/sink_failures", 0.0) for _, data in good.steps) == 3.0


def test_each_token_text_is_written_once(tmp_path: Path) -> None:
    import numpy as np

    from rollbook.types import Prompt, Trajectory

    def asked(*ids: int) -> Trajectory:
        prompt = Prompt(prompt_id="p", prompt_ids=np.array(ids, np.int32), source="s")
        return Trajectory(group_id=0, member_idx=0, prompt=prompt)

    def decode(ids: Any) -> str:
        return f"<{ids[0]}>"

    with Recorder(tmp_path / "run", decode=decode) as recorder:
        recorder.trajectories(0, [asked(1, 2)])
    with Recorder(tmp_path / "run", decode=decode, resume=True) as recorder:
        recorder.trajectories(1, [asked(2, 3)])
    lines = list(read_json_lines(tmp_path / "run" / "tokens.jsonl"))
    assert lines == [{"id": 1, "text": "<1>"}, {"id": 2, "text": "<2>"}, {"id": 3, "text": "<3>"}]
