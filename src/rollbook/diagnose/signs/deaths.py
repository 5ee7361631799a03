"""Replicas that died, and came back or did not."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

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
    """Replicas that died, in order, from the events of our run directories."""
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
