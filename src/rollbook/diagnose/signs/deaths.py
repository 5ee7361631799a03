"""Replicas that died, and came back or did not."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from rollbook.diagnose.series import finite
from rollbook.diagnose.view import View, once


@dataclass(frozen=True, slots=True)
class Death:
    """A replica whose process or engine was gone."""

    replica: str
    step: int
    why: str
    back_step: int | None
    """The step in which it served again; None: it did not."""
    away_s: float | None
    """Seconds until then, where the log's clock tells."""


_DIED = re.compile(
    r"process is gone|\bdied\b|the engine of replica \d+ (?:failed|was closed)|actor (?:died|is dead)"
    r"|failed \d+ times, at last with"
)
"""Why a replica serves nothing, where it is not its weights or its logprobs."""


@once("deaths")
def deaths_of(view: View) -> tuple[Death, ...]:
    """Replicas that died, in order: from the events of our run directories, else from the words of a console log."""
    return _of_consoles(view) if view.events("engine_died") else _of_run_directories(view)


def _of_run_directories(view: View) -> tuple[Death, ...]:
    found: list[Death] = []
    open_since: dict[str, int] = {}
    """Replica -> position in `found` of the death that it has not come back from."""
    died_at_s: dict[str, float | None] = {}
    for event in view.run.events:
        step = int(view.run.steps[-1]) if event.step is None else event.step
        replica = str(event.fields.get("replica_id"))
        if event.kind == "quarantined" and replica not in open_since and _DIED.search(event.text):
            open_since[replica] = len(found)
            died_at_s[replica] = event.at_s
            found.append(Death(replica, step, event.text, None, None))
        back = [replica] if event.kind == "back_in_service" else []
        if event.kind == "run_resumed":  # every replica is started anew
            back = list(open_since)
        for name in back:
            if (i := open_since.pop(name, None)) is not None:
                began, ended = died_at_s[name], event.at_s
                away_s = max(ended - began, 0.0) if began is not None and ended is not None else None
                found[i] = replace(found[i], back_step=step, away_s=away_s)
    return tuple(found)


_WHICH = re.compile(
    r"(?:[Ee]ngine|[Rr]eplica|[Ss]erver)(?:Core)?_?(?:DP|id=|#|-| )?(\d+)\b|(https?://\S+?|\d+(?:\.\d+){3}:\d+)[\s,;]"
)
UNNAMED = "of a rollout engine"
USUAL_AGAIN = 1.2
"""Seconds of a step over those before a death from which on its replica serves again, where no line says so."""


def _of_consoles(view: View) -> tuple[Death, ...]:
    """What other systems write of an engine that died while the run went on: lines of one step are one death, a run
    that was started anew or ended there lost more than a replica."""
    found: list[Death] = []
    restarts = {view.step_at(view.idx_of(seam.step)) for seam in view.run.seams}
    restarts |= {event.step for event in view.events("resumed", "run_resumed") if event.step is not None}
    last_step = int(view.run.steps[-1])
    for event in view.events("engine_died", "engine_back"):
        step = event.step
        if step is None or step >= last_step or any(step <= again <= step + 1 for again in restarts):
            continue
        match = _WHICH.search(event.text + " ")
        which = next((part for part in match.groups() if part), UNNAMED) if match else UNNAMED
        if event.kind == "engine_back":
            at = next((i for i, death in enumerate(found) if death.back_step is None), None)
            if at is not None:
                found[at] = replace(found[at], back_step=step + 1)
        elif (
            not found or step > found[-1].step + 1
        ):  # the step under way is the one after the last that was logged
            found.append(Death(which, step + 1, event.text, None, None))
    return tuple(
        replace(death, back_step=_usual_again(view, death.step)) if death.back_step is None else death
        for death in found
    )


def _usual_again(view: View, step: int) -> int | None:
    """The first step after a death from which on steps take as long as before; None where they stay longer, or where
    they are not timed."""
    seconds = view.values.get("timing_s/step")
    idx = view.idx_of(step)
    past = seconds[max(0, idx - 20) : idx] if seconds is not None else np.zeros(0)
    past = finite(past)
    if seconds is None or len(past) < 3:
        return None
    longer = np.flatnonzero(seconds[idx:] > USUAL_AGAIN * np.median(past))
    end = idx + (int(longer[-1]) + 1 if len(longer) else 0)
    return view.step_at(end) if end <= view.n - 3 else None
