"""Generation takes many times what the lengths explain, for good, and no signal of the log says why. Whatever it is,
the run is not well; the finding says what to log so that the cause can be told. The tree leaves it out where another
rule found something."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.signs.seconds import excess_of, host_slowdown, lost_in_steps, step_seconds
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_contrast

RULE = "slow_generation"
TIMES = 2.0
"""Seconds of generation over what the lengths explain, from which on neither prompts nor a busy host are it."""
LONGER = 1.5
"""Seconds of generation themselves over those before."""
OF_THE_STEP = 0.2
"""Share of a step's seconds that is lost to it at the least."""
LEAST_STEPS = 8
"""Steps that it lasts, up to the end of the log."""


def judge(view: View) -> Finding | None:
    excess = excess_of(view)
    rise = view.rise(excess)
    if excess is None or rise is None or rise.end_idx is not None or rise.score < 6 or rise.idx < LEAST_STEPS:
        return None
    times = view.last(excess) / view.level(excess, max(0, rise.idx - 40), rise.idx)
    if view.n - rise.idx < LEAST_STEPS or min(times, rise.peak_ratio) < TIMES:
        return None
    usual, now = view.level("timing_s/gen", max(0, rise.idx - 40), rise.idx), view.last("timing_s/gen")
    if not now >= LONGER * usual:
        return None  # shorter responses need no shorter generation: prompts, calls and the tail stay
    lost = now * (1.0 - 1.0 / times)
    if not lost >= OF_THE_STEP * step_seconds(view, rise.idx) or lost < now - usual - lost:
        return None  # hardly felt, or most of it is longer responses
    if host_slowdown(view, rise.idx) >= 1.4 or _has_more_to_do(view, rise.idx):
        return None
    step = rise.step
    evidence = [
        Evidence(
            metric="timing_s/gen",
            step=step,
            before=usual,
            after=now,
            says=f"{num(usual)} s before step {step}, {num(now)} s now: {num(times)} times what the lengths explain",
        )
    ]
    if (length := view.contrast("response_length/mean", rise.idx, width=20)) is not None:
        evidence.append(of_contrast(view, length, rise.idx, "not for longer responses"))
    return Finding(
        rule=RULE,
        title=f"generation takes {num(times)} times what the lengths explain, and nothing that was logged says why",
        area="implementation",
        confidence=0.55,
        step=step,
        evidence=tuple(evidence),
        cost_s=lost_in_steps(view, rise.idx),
        action="log what would tell: seconds and failures of environment calls, samples that a filter drops, the "
        "longest responses, and of each replica tokens/s, running requests and preemptions; until then look how many "
        "replicas serve, and at their own logs since that step",
        next_check="tokens/s of one replica alone at the same batch, against the steps before",
    )


def _has_more_to_do(view: View, idx: int) -> bool:
    """Whether a step has more sequences, turns or prompt tokens, or longer longest responses, than before."""
    explains = (
        ("batch/num_sequences", 1.3),
        ("perf/total_num_tokens", 1.4),
        ("num_turns/mean", 1.3),
        ("prompt_length/mean", 1.5),
        ("response_length/max", 1.4),
        ("response_length/p99", 1.4),
    )
    grown = ((view.contrast(metric, idx, width=20), least) for metric, least in explains)
    return any(c is not None and np.isfinite(c.ratio) and c.ratio >= least for c, least in grown)
