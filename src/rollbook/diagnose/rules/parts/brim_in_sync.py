"""The peak of device memory within the hand-over itself (`oom_in_sync`), where a log has it under any name: it climbs
to the device's size while the training's own peak has room, and the allocator must try again, or the log ends in it."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence
from rollbook.diagnose.readers.words import words_of
from rollbook.diagnose.signs import memory
from rollbook.diagnose.units import BYTES, GIB, unit_of
from rollbook.diagnose.view import View, once
from rollbook.diagnose.wording import num

IN_SYNC = "peak of the hand-over GiB"
_OF_SYNC = frozenset(("weight", "sync", "reshard", "handover", "wake", "wakeup"))
_PEAK = frozenset(("peak", "max", "allocated", "used"))
GROWN = 1.06
"""Growth over the run from which on it climbs."""
BRIM, NEAR = 0.955, 0.93
"""Shares of the device at which it ends, and from which on the next larger bucket may not fit."""
ROOM = 0.92
"""Peak of the training over that of the hand-over, up to which it is not the training that fills the device."""
EVERY = 0.9
"""Share of the steps that are timed, from which on a last one that is not was cut short."""
SLOWER = 1.2
"""Growth of the seconds of the hand-over from which on it waits for the allocator."""


@once("brim in sync")
def brim_in_sync(view: View) -> tuple[Evidence, ...]:
    """What shows that the hand-over runs out of memory; nothing where it does not."""
    metric = _peak_in_sync(view)
    if metric is None or view.count(metric) < 12:
        return ()
    values = view.values[metric]
    (ratio, steadiness), top = view.trend(metric), float(np.nanmax(values))
    capacity = view.last(memory.TOTAL) if view.has(memory.TOTAL) else memory.smallest_device(top)
    trained = memory.allocated(view)
    if ratio < GROWN or steadiness < 0.8 or capacity is None or view.last(metric, 3) < BRIM * capacity:
        return ()
    if trained is not None and view.last(trained, 3) > ROOM * top:
        return ()
    ends = _ends_in_it(view)
    waits = (*_waits(view), *ends)
    if not waits:
        return ()
    at = view.n - 1 if ends else int(np.flatnonzero(np.nan_to_num(values) >= NEAR * capacity)[0])
    tried = (view.begins(metric, 1.0) for metric in _retries(view))
    at = max([at, *filter(None, tried)])  # near the brim it may live for long, if nothing need be tried again
    step, early = view.step_at(at), view.level(metric, 0, max(3, view.n // 8))
    has_room = f", {num(view.last(trained, 3))} GiB in training" if trained is not None else ""
    says = f"{num(early)} GiB at first, {num(top)} of {num(capacity)} in the end{has_room}"
    return (Evidence(metric=metric, step=step, before=early, after=top, says=says), *waits)


def _ends_in_it(view: View) -> tuple[Evidence, ...]:
    """That the last step was trained, and neither handed over nor timed as a whole, as all before it were."""
    done, others = "timing_s/update_actor", ("timing_s/update_weights", "timing_s/step")
    if any(view.count(metric) < EVERY * view.n for metric in (done, *others)):
        return ()
    is_last = bool(np.isfinite(view.values[done][-1]))
    is_open = is_last and not any(np.isfinite(view.values[metric][-1]) for metric in others)
    called = view.run.in_log
    for event in view.events("open_step"):
        names = event.fields["names"]
        is_open |= called.get(done, done) in names and not any(called.get(m, m) in names for m in others)
    says = "the log ends in a step that was trained and not handed over"
    return (Evidence(metric=others[0], step=view.step_at(view.n - 1), says=says),) if is_open else ()


def _waits(view: View) -> tuple[Evidence, ...]:
    """Allocations that were tried again, and hand-overs that take longer."""
    found = []
    for metric in _retries(view):
        early, late = view.level(metric, 0, max(3, view.n // 8)), view.last(metric)
        if late >= early + 2.0:
            says = f"{num(early)} allocations were tried again at first, {num(late)} now"
            step = view.step_at(view.n - 1)
            found.append(Evidence(metric=metric, step=step, before=early, after=late, says=says))
    seconds = "timing_s/update_weights"
    ratio, steadiness = view.trend(seconds)
    if ratio >= SLOWER and steadiness >= 0.6:
        early, late = view.level(seconds, 0, max(3, view.n // 8)), view.last(seconds)
        says = f"the hand-over takes {num(late)} s, {num(early)} s at first"
        found.append(
            Evidence(metric=seconds, step=view.step_at(view.n - 1), before=early, after=late, says=says)
        )
    return tuple(found)


def _retries(view: View) -> list[str]:
    """Series of allocations that were tried again."""
    return [
        metric
        for metric in view.values
        if (words := words_of(metric)) & {"retries", "retry"}
        and words & {"alloc", "allocation", "memory", "oom"}
        and view.count(metric) >= 12
    ]


def _peak_in_sync(view: View) -> str | None:
    """Name of the series in GiB, of the name in the log that has the words."""
    for metric, values in view.run.values.items():
        words = words_of(metric)
        unit = unit_of(words)
        if unit is None or "memory" not in words or not words & _OF_SYNC or not words & _PEAK:
            continue
        if words & {"free", "reserved", "cpu", "host"} or metric == memory.ALLOCATED:
            continue
        return metric if unit == "gb" else view.derive(IN_SYNC, values * (BYTES[unit] / GIB), of=(metric,))
    return None
