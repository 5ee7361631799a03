"""A diagnosis in the names of the log: who reads "timing_s/gen rises" looks for it in a file that says
"perf/rollout_time"."""

from __future__ import annotations

import re
from dataclasses import replace

from rollbook.diagnose.finding import Diagnosis, Evidence, Finding, Signal, State
from rollbook.diagnose.view import View

_NAME = re.compile(r"[A-Za-z_][\w@+\-]*(?:/[\w@+\-.]*[\w@+\-])+")


def as_logged(diagnosis: Diagnosis, view: View) -> Diagnosis:
    """The same diagnosis; every metric that the log calls otherwise is called so in its words."""
    in_log, derived = view.run.in_log, view.derived_from
    if not in_log and not derived:
        return diagnosis

    def words(text: str) -> str:
        return _NAME.sub(lambda found: in_log.get(found.group(), found.group()), text) if in_log else text

    def label(metric: str) -> str:
        sources = derived.get(metric)
        return words(f"{metric} (of {', '.join(sources)})" if sources else metric)

    def evidence(items: tuple[Evidence, ...]) -> tuple[Evidence, ...]:
        return tuple(
            replace(
                item,
                says=words(item.says),
                in_log="" if (name := label(item.metric)) == item.metric else name,
            )
            for item in items
        )

    def finding(item: Finding) -> Finding:
        return replace(
            item, title=words(item.title), evidence=evidence(item.evidence), next_check=words(item.next_check)
        )

    def state(item: State) -> State:
        return replace(item, title=words(item.title), evidence=evidence(item.evidence))

    def signal(item: Signal) -> Signal:
        return replace(item, says=words(item.says))

    return replace(
        diagnosis,
        findings=tuple(map(finding, diagnosis.findings)),
        consequences=tuple(map(finding, diagnosis.consequences)),
        states=tuple(map(state, diagnosis.states)),
        signals=tuple(map(signal, diagnosis.signals)),
        notes=tuple(map(words, diagnosis.notes)),
    )
