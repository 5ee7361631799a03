"""Counters of an engine that was started again go on where the one before it ended; gauges are its own."""

from __future__ import annotations

from dataclasses import fields

from rollbook.rollout.engine import COUNTERS, EngineStats


def stats(number: int) -> EngineStats:
    """Every number of it is `number`."""
    told = {
        field.name: number
        for field in fields(EngineStats)
        if field.name not in ("mismatch", "waiting_requests")
    }
    return EngineStats(**told)  # type: ignore[arg-type]


def test_counters_go_on_and_gauges_do_not() -> None:
    both = stats(2).going_on(stats(5))
    assert {name: getattr(both, name) for name in COUNTERS} == dict.fromkeys(COUNTERS, 7)
    assert (both.weight_version, both.num_running, both.num_slots, both.kv_used_tokens) == (2, 2, 2, 2)
    assert stats(2).going_on(None) == stats(2)
