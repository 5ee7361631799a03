"""Device memory: the allocator's two numbers in GiB, the size of the device, whether it is full, and the errors that
say so."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import NotJudged
from rollbook.diagnose.series import Event, finite
from rollbook.diagnose.view import View, once

DEVICE_GIB = (16.0, 22.0, 24.0, 32.0, 40.0, 48.0, 64.0, 80.0, 96.0, 141.0, 180.0, 192.0, 288.0)
"""Memory of devices in use, as PyTorch's gigabytes come close to."""
COMMON_GIB = (80.0, 141.0, 180.0, 192.0, 288.0)
"""Those that most trainings run on: memory that ends just below one of these is at the brim of it. The smaller ones lie
so close that memory ends below one of them by chance."""
ALLOCATED = "perf/max_memory_allocated_gb"
RESERVED = "perf/max_memory_reserved_gb"
TOTAL = "perf/device_memory_gb"
"""Size of the device, where a log tells it beside what is used."""
GOT_OVER = 3
"""Steps after an error without which the run has not been shown to have got over it."""


def said(view: View, *, in_sync: bool) -> list[Event]:
    """The errors of memory in a hand-over, or elsewhere, that ended the run or sent it back to a checkpoint; one that
    more steps follow as if nothing had been is of a program that a model wrote, or was caught. Of one crash that is
    reported from several places the hand-over's words stand."""
    every = view.events("out_of_memory")
    of_sync = [e for e in every if e.fields.get("stage") == "sync"]
    errors = of_sync if in_sync else [e for e in every if e.step not in {other.step for other in of_sync}]
    anew = [e.step for e in view.events("resumed", "run_resumed", "run_started") if e.step is not None]
    anew += [seam.step - 1 + seam.num_replaced for seam in view.run.seams]  # where it had been
    last = view.step_at(view.n - 1)
    return [
        e
        for e in errors
        if e.step is None or e.step > last - GOT_OVER or any(abs(step - e.step) <= GOT_OVER for step in anew)
    ]


def not_logged(view: View, rule: str, missing: tuple[str, ...], collect: str) -> NotJudged | None:
    """That a rule cannot be judged without memory; None of a run without a device whose memory could run out, as ours
    log it wherever there is one."""
    if view.run.format == "rollbook" and not view.run.matching("memory/"):
        return None
    return NotJudged(rule=rule, missing=missing, lacks="device memory", collect=collect)


@once("allocated")
def allocated(view: View) -> str | None:
    """The series of allocated device memory, GiB: verl's, or the largest of our points of a hand-over."""
    if view.has(ALLOCATED):
        return ALLOCATED
    return _largest(view, "/allocated_bytes", "allocated GiB")


@once("reserved")
def reserved(view: View) -> str | None:
    if view.has(RESERVED):
        return RESERVED
    return _largest(view, "/reserved_bytes", "reserved GiB")


def _largest(view: View, suffix: str, name: str) -> str | None:
    points = view.family("memory/", suffix)
    if not points:
        return None
    stack = np.stack([view.values[m] for m in points])
    known = np.isfinite(stack).any(axis=0)
    out = np.full(view.n, np.nan)
    out[known] = np.nanmax(stack[:, known], axis=0) / 2**30
    return view.derive(name, out)


def device_gib(view: View) -> float | None:
    """The device's size if the log has it, else that of the smallest that holds what was reserved; None when nothing is
    known, or what the log has is no size."""
    gib = _told_gib(view)
    return gib if gib is not None and gib > 0.0 else None


def _told_gib(view: View) -> float | None:
    if view.has(TOTAL):
        return view.last(TOTAL)
    free = view.family("memory/", "/free_bytes")
    taken = reserved(view) or allocated(view)
    if taken is None:
        return None
    top = float(np.nanmax(view.values[taken]))
    if free:
        return top + float(min(np.nanmin(view.values[m]) for m in free)) / 2**30
    return smallest_device(top)


def smallest_device(gib: float) -> float | None:
    """Size of the smallest device that holds so much."""
    return next((size for size in DEVICE_GIB if size >= gib * 0.998), None)


CLOSED_FRAC = 0.5
"""Share of the room that the allocator had at first which is left at a brim: what is reserved stops there, and what is
allocated in it goes on."""
NO_ROOM = 0.05
"""Share of what is reserved that is then free at the most."""
TO_THE_LAST = 0.985
"""Share of a device that nothing but its end keeps the allocator from exceeding."""


def is_size_known(view: View, used: str, capacity: float) -> bool:
    """Whether `device_gib` is more than the next size above what happens to be used: the log has it, or most devices
    are of that size, or the allocator has run into it."""
    if view.has(TOTAL) or view.family("memory/", "/free_bytes") or capacity in COMMON_GIB:
        return True
    kept = reserved(view)
    if kept is None or kept == used:
        return False
    third = max(3, view.n // 3)
    if min(view.level(kept, 0, third), _last_peak(view, kept)) <= 0.0:
        return False
    first = 1.0 - view.level(used, 0, third) / view.level(kept, 0, third)
    last = 1.0 - _last_peak(view, used) / _last_peak(view, kept)
    return _last_peak(view, kept) >= TO_THE_LAST * capacity or last <= min(NO_ROOM, CLOSED_FRAC * first)


FULL = 0.92
"""Share of the device in use beyond which the next larger allocation does not fit."""
NEARLY_FULL = 0.85
"""Share of the device that must be in use where the allocator has taken all of it."""
TAKEN = 0.97
"""Share of the device from which on the allocator has taken all of it: what comes next must fit into what it holds."""
FOR_PROCESSES = 0.985
"""Share of a device's nominal size that its driver leaves, 78.8 of 80."""


def is_full(view: View, used: str, capacity: float) -> bool:
    """Whether the next larger allocation does not fit: by what is used, or by what the allocator has taken."""
    kept = reserved(view)
    top = _last_peak(view, used)
    taken = _last_peak(view, kept) if kept is not None else np.nan
    room = capacity if view.has(TOTAL) else FOR_PROCESSES * capacity
    return top >= FULL * capacity or (top >= NEARLY_FULL * capacity and taken >= TAKEN * room)


def _last_peak(view: View, metric: str) -> float:
    """The largest of the last three values: each is a peak already, and where they grow the last one counts."""
    values = view.values[metric]
    return float(np.max(finite(values)[-3:]))


LONGEST_YET = 1.3
"""Longest response of a step over all before it from which on a leap of memory in that step is its own."""


def leaps_with_the_longest(view: View, idx: int) -> bool:
    """Whether the longest response up to a position came in its step, or beside it: a peak that is kept leaps with one
    batch as much as with a hand-over, and medians around it show nothing of one response."""
    values = view.values.get("response_length/max")
    if values is None or idx < 4:
        return False
    known = np.nan_to_num(values)
    return bool(known[idx - 1 : idx + 2].max() >= LONGEST_YET * known[: idx - 1].max() > 0.0)
