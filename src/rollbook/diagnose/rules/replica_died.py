"""Replicas died, and were started again or not: their requests were made again by others, which takes time and nothing
else. Told by our run directories' events and by the words of vLLM, SGLang, slime and Ray in console logs; a replica
that was taken out alive (a publication it refused, logprobs that differ) is another rule's.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from rollbook.diagnose.breaks import BASELINE
from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.deaths import UNNAMED, Death, deaths_of
from rollbook.diagnose.signs.seconds import step_seconds
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, share

RULE = "replica_died"

MANY = 3
"""Deaths that are a fault of their own, however little each one cost."""
COSTLY_FRAC = 0.05
"""Share of the seconds since the first death beyond which they are worth waking somebody."""


def judge(view: View) -> Finding | None:
    deaths = deaths_of(view)
    if not _is_worth_it(view, deaths):
        return None
    first = deaths[0]
    gone = sorted({death.replica for death in deaths if death.back_step is None})
    evidence = tuple(_evidence(view, death) for death in deaths[:4])
    if len(deaths) > 4:
        last = deaths[-1]
        says = f"and {len(deaths) - 4} more, the last one at step {last.step}"
        evidence += (Evidence(metric=_metric(view), step=last.step, says=says),)
    if not gone:
        after = "came back"
    elif len(gone) == len({death.replica for death in deaths}):
        after = "did not come back"
    else:
        after = f"{', '.join(map(_name, gone))} did not come back"
    resume = " Resume the run to have it back." if gone else ""
    return Finding(
        rule=RULE,
        title=f"{_who_died(deaths)} and {after}",
        area="implementation",
        confidence=share(0.95),
        step=first.step,
        until_step=None if gone else deaths[-1].back_step,
        evidence=evidence,
        cost_s=sum(_lost_s(view, death) for death in deaths),
        action=f"read that replica's own log from before step {deaths[-1].step} on (memory, a device that fell off the "
        f"bus, a host that went away); what it was sampling was sampled again, nothing is lost but time.{resume}",
        next_check="is it always the same replica or host, and did its host memory or KV pool fill up before?",
    )


def note(view: View) -> str:
    """One line on deaths that cost too little for a finding; empty where there were none."""
    deaths = deaths_of(view)
    if not deaths or _is_worth_it(view, deaths):
        return ""
    lost_s = sum(_lost_s(view, death) for death in deaths)
    at = ", ".join(str(death.step) for death in deaths)
    return (
        f"{_who_died(deaths)} and came back (step {at}); it cost {num(lost_s)} s, the run lost nothing else"
    )


def _is_worth_it(view: View, deaths: tuple[Death, ...]) -> bool:
    if not deaths:
        return False
    if len(deaths) >= MANY or any(death.back_step is None for death in deaths):
        return True
    since = view.idx_of(deaths[0].step)
    took_s = step_seconds(view, since) * (view.n - since) * view.stride
    return sum(_lost_s(view, death) for death in deaths) >= COSTLY_FRAC * took_s


def _who_died(deaths: tuple[Death, ...]) -> str:
    counts = Counter(death.replica for death in deaths)
    times = {replica: f" {count} times" if count > 1 else "" for replica, count in counts.items()}
    return ", ".join(f"{_name(replica)} died{times[replica]}" for replica in counts)


def _name(replica: str) -> str:
    return "a rollout engine" if replica == UNNAMED else f"replica {replica}"


def _evidence(view: View, death: Death) -> Evidence:
    away = "no sign of its return" if view.events("engine_died") else "not started again"
    if death.back_step is not None:
        away = f"back at step {death.back_step}"
        if death.away_s is not None:
            away += f", after {num(death.away_s)} s"
    lost = f"; steps were {num(lost_s)} s longer" if (lost_s := _lost_s(view, death)) else ""
    says = f"{_name(death.replica)} died at step {death.step} ({death.why}): {away}{lost}"
    return Evidence(metric=_metric(view), step=death.step, says=says)


def _metric(view: View) -> str:
    return "log" if view.events("engine_died") else "replica/num_serving"


def _lost_s(view: View, death: Death) -> float:
    """Seconds by which the steps from a death to the return were longer than the steps before."""
    step = view.values.get("timing_s/step")
    if step is None:
        return 0.0
    idx = view.idx_of(death.step)
    end = view.n if death.back_step is None else view.idx_of(death.back_step) + 1
    past = step[max(0, idx - BASELINE) : idx]
    past = finite(past)
    if len(past) < 3:
        return 0.0
    return max(float(np.nansum(step[idx:end] - np.median(past))) * view.stride, 0.0)
