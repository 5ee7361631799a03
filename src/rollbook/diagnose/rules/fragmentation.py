"""The allocator holds ever more memory that nobody uses: reserved grows, allocated does not."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose import signs
from rollbook.diagnose.changes import running_median
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules import memory
from rollbook.diagnose.rules.wording import num, share
from rollbook.diagnose.view import View

RULE = "fragmentation"
HELD = "reserved - allocated GiB"


def judge(view: View) -> Finding | NotJudged | None:
    used, kept = memory.allocated(view), memory.reserved(view)
    if used is None or kept is None:
        return NotJudged(
            rule=RULE,
            missing=(memory.ALLOCATED, memory.RESERVED),
            collect="log allocated and reserved device memory each step",
        )
    view.derive(HELD, view.values[kept] - view.values[used])
    part = max(4, view.n // 6)
    # The first sixth is warm-up: an allocator grows until every shape has been seen once.
    early, third = view.level(HELD, part, 2 * part), view.level(HELD, view.n // 3, view.n // 3 + part)
    late, top = view.level(HELD, view.n - part), view.last(kept, part)
    used_before, used_after = view.level(used, part, 2 * part), view.level(used, view.n - part)
    if not all(map(np.isfinite, (early, third, late, top, used_before, used_after))) or view.n < 24:
        return None
    grown = late - early
    flat = abs(used_after - used_before) <= 0.6 * grown
    after_warmup = late - third >= 0.4 * grown
    if (
        grown < 0.07 * top
        or late < 1.4 * early
        or not flat
        or not after_warmup
        or _is_one_piece(view, part, grown)
    ):
        return None
    idx = _left_at(view, view.level(HELD, 0, part), late)
    slower = view.rise("timing_s/update_actor")
    per_token = view.rise("timing_per_token_ms/update_actor")
    evidence = [
        Evidence(
            metric=kept,
            step=view.step_at(idx),
            before=view.level(kept, part, 2 * part),
            after=top,
            says=f"reserved grows to {num(top)} GiB, allocated stays at {num(used_after)}",
        ),
        Evidence(
            metric=HELD,
            step=view.step_at(idx),
            before=early,
            after=late,
            says=f"held and not used: {num(early)} to {num(late)} GiB, and growing",
        ),
    ]
    cost = None
    if slower is not None and per_token is not None and slower.idx > part and slower.ratio > 1.1:
        cost = signs.lost_seconds(view, "timing_s/update_actor", slower)
    capacity = memory.device_gib(view)
    near = capacity is not None and top >= 0.9 * capacity
    return Finding(
        rule=RULE,
        title="device memory is fragmented: ever more is held and not used",
        area="implementation",
        confidence=share(0.8 + 0.1 * near + 0.05 * (late >= 2 * early)),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        cost_s=cost,
        action="set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (with an engine in the same "
        "process: separate memory pools), "
        "and empty the cache at the hand-over",
        next_check="a memory snapshot after the hand-over: which shapes leave the holes?",
    )


def _left_at(view: View, first: float, late: float) -> int:
    """Where what is held leaves a tenth of its way up for good."""
    known = np.flatnonzero(np.isfinite(view.values[HELD]))
    smooth = running_median(view.values[HELD][known], 7)
    low = np.flatnonzero(smooth <= first + 0.1 * (late - first))
    return int(known[min(int(low[-1]) + 1, len(known) - 1)]) if len(low) else 0


def _is_one_piece(view: View, start: int, grown: float) -> bool:
    """Whether half of the growth since `start` came at one step: a first validation or checkpoint does that."""
    values = view.values[HELD][start:]
    values = values[np.isfinite(values)]
    return bool(np.max(values[3:] - values[:-3], initial=0.0) >= 0.5 * grown)
