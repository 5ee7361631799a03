"""Environments under a team's own names, and in words alone."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import Array, noisy, run_of
from rollbook.diagnose.env_words import named_by_words
from rollbook.diagnose.report import to_text
from rollbook.diagnose.series import Event
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N, dtype=np.float64)
SHARE, COUNT = np.full(4, 0.25), np.full(4, 40.0)


@pytest.mark.parametrize(
    ("name", "values", "metric"),
    [
        ("env/failure_rate", SHARE, "rollout/sandbox_error_ratio"),
        ("rollout/tool_failure", SHARE, "rollout/sandbox_error_ratio"),
        ("env/timeout_rate", SHARE, "rollout/timeout_sample_ratio"),
        ("sandboxErrors", COUNT, "env/num_errors"),
        ("tools/num_timeouts", COUNT, "env/num_timeouts"),
        ("rollout/env/active_sandboxes", COUNT, "env/num_active"),
        ("containers_in_use", COUNT, "env/num_active"),
        ("env/sandbox_capacity", COUNT, "env/capacity"),
        ("rollout/tool_time", SHARE, "env/turn_s/mean"),
        ("tool_call_latency_max", SHARE, "env/turn_s/max"),
        ("rollout/num_turns", COUNT, "num_turns/mean"),
        ("env/format_error", SHARE, None),  # the policy's
        ("env/all/reward/total", SHARE, None),
        ("tools/call_frequency", SHARE, None),
        ("timing_s/agent_loop/tool_calls/min", SHARE, None),
        ("actor/error", SHARE, None),
        ("num_turns/max", COUNT, None),
        ("val/env/timeout_rate/std", SHARE, None),
    ],
)
def test_a_name_of_an_environment_is_read_by_its_words(name: str, values: Array, metric: str | None) -> None:
    assert named_by_words({name: values}) == ({} if metric is None else {metric: name})


def test_the_catalogues_own_name_stands() -> None:
    assert named_by_words({"env/num_active": COUNT, "sandbox_active": COUNT}) == {}


AGENTS = {
    "num_turns": noisy(4.0, 30, 0.02),
    "env/tool_time": noisy(3.0, 31, 0.05),
    "env/failure_rate": noisy(0.006, 32, 0.1),
    "env/sandbox_active": np.round(noisy(40.0, 33, 0.02)),
}


def test_a_fifth_of_the_calls_that_fail_at_once_and_for_good_are_dead_sandboxes() -> None:
    dead = AGENTS | {"env/failure_rate": noisy(np.where(T >= 60, 0.22, 0.006), 32, 0.05)}
    dead |= {"num_turns": noisy(np.where(T >= 60, 3.5, 4.0), 30, 0.02)}
    diagnosis = diagnose(run_of(dead))
    assert [(f.rule, f.step) for f in diagnosis.findings] == [("dead_sandbox_pool", 61)]
    assert "of env/failure_rate" in to_text(diagnosis), "a reader looks for the log's own name"
    slowly = dead | {"env/failure_rate": noisy(0.006 + 0.2 * np.clip((T - 20) / 90, 0, 1), 32, 0.05)}
    assert "dead_sandbox_pool" not in [f.rule for f in diagnose(run_of(slowly)).findings]


def _active(grown: Array) -> Array:
    return np.round(noisy(40.0 * grown, 33, 0.02))


def test_sandboxes_in_use_that_only_grow_leak_before_anything_waits_for_them() -> None:
    leak = AGENTS | {"env/sandbox_active": _active(1 + 0.02 * np.clip(T - 40, 0, None))}
    found = diagnose(run_of(leak)).findings
    assert [f.rule for f in found] == ["sandbox_leak"]
    assert abs(found[0].step - 41) <= 10


@pytest.mark.parametrize(
    "changed",
    [
        {"response_length/mean": noisy(800.0 * (1 + 0.02 * np.clip(T - 40, 0, None)), 8)},  # more work
        {"env/sandbox_active": _active(1 + 0.8 * (T >= 60))},  # more of them, by somebody's choice
        {"env/sandbox_active": _active(1 + 0.02 * np.clip(np.minimum(T, 140 - T) - 40, 0, None))},
    ],
)
def test_sandboxes_in_use_that_grow_with_the_work_or_at_once_or_come_back_do_not_leak(
    changed: dict[str, Array],
) -> None:
    grows = {"env/sandbox_active": _active(1 + 0.02 * np.clip(T - 40, 0, None))}
    assert "sandbox_leak" not in [f.rule for f in diagnose(run_of(AGENTS | grows | changed)).findings]


def _complaints(since: int, every: int) -> tuple[Event, ...]:
    said = "WARNING tool call failed: ConnectError('All connection attempts failed') to sandbox 10.0.0.1:80"
    return tuple(Event(kind="sandbox_failure", step=s, text=said) for s in range(since, N, every))


FALLS = np.where(T >= 60, 0.3, 0.45) + np.random.default_rng(1).normal(0, 0.03, N)


def test_where_nothing_of_environments_is_measured_the_logs_words_tell_of_dead_ones() -> None:
    found = diagnose(run_of({"critic/score/mean": FALLS}, events=_complaints(60, 3))).findings
    assert [f.rule for f in found] == ["dead_sandbox_pool"]
    assert abs(found[0].step - 61) <= 4
    assert "tool call failed" in found[0].evidence[0].says


@pytest.mark.parametrize(
    ("reward", "events"),
    [
        (FALLS, _complaints(0, 3)),  # it always complained
        (FALLS + 0.15 * (T >= 60), _complaints(60, 3)),  # nothing is lost
        (FALLS, _complaints(60, 3)[:8]),  # and it stopped
    ],
)
def test_lines_that_are_usual_cost_nothing_or_ended_are_no_dead_sandboxes(
    reward: Array, events: tuple[Event, ...]
) -> None:
    found = diagnose(run_of({"critic/score/mean": reward}, events=events)).findings
    assert "dead_sandbox_pool" not in [f.rule for f in found]
