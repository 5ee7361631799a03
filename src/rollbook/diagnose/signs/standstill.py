"""A log that ends in one line said again and again, and which rule its words belong to."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.finding import Evidence
from rollbook.diagnose.signs.seconds import step_seconds
from rollbook.diagnose.view import View, once
from rollbook.diagnose.wording import num

_TOLD_BY: tuple[tuple[str, str], ...] = (
    # rule, what its words look like; the first that fits
    (
        "collective_hang",
        r"barrier|all_?-?reduce|all_?-?gather|all_?-?to_?-?all|reduce_?-?scatter|broadcast|nccl|collective|rendezvous"
        r"|process group|\branks?\b",
    ),
    (
        "buffer_never_fills",
        r"sample|group|batch|rollout|trajector|buffer|prompt|generat|response|queue|episode|experience|accepted|collected"
        r"|(?=.*\b(?:running\W{1,3}\d|\d+ running))"
        r"(?=.*\b(?:(?:finished|completed|done)\W{1,3}\d|\d+ (?:finished|completed|done)))",
    ),
)
STEPS = 5.0
"""Usual steps that the line lasts, at the least: twice one is a slow step."""
LONGEST = 2.0
"""Of the longest steps of the run."""
_PAUSES = ("timing_s/testing", "timing_s/save_checkpoint")
"""What a step may be timed without, and nothing is generated in."""
LEAST_S = 600.0
UNTIMED_S = 3600.0
"""Where steps were not timed."""

_OF = re.compile(r"(?<![\d./])(\d+) ?(?:/|of) ?(\d+)(?![\d./])")
_COUNTED = re.compile(r"\bcount=(\d+)\b.{0,20}?\b(?:accepted|collected|received)[ =:]+(\d+)")
"""How AReaL writes the pair: `wait(count=512): accepted 508`."""
_NOTHING_COMES = re.compile(
    r"\b(?:0|no|none|nothing) (?:\w+ )?(?:in[ -]flight|running|active|outstanding|on (?:its|their|the) way)\b"
    r"|\b(?:in[ -]flight|running|active|outstanding)[ =:]+0(?![\d./])",
    re.IGNORECASE,
)
_SAYS_IT_HANGS = re.compile(r"\b(?:hang(?:s|ing)?|hung|stuck|deadlock(?:ed)?)\b", re.IGNORECASE)
"""What is said of no slow step."""


@dataclass(frozen=True, slots=True)
class Standstill:
    """The line, and since when."""

    step: int
    words: str
    lasted_s: float
    told_by: str | None
    """The rule that its words belong to; None: no rule of its own."""
    evidence: Evidence


@once("standstill")
def standstill_of(view: View) -> Standstill | None:
    """The line that the log ends in, where it lasts far beyond what any step took: a log that is being written, in a
    step that takes its time, has none."""
    found = view.events("standstill")
    if not found:
        return None
    event = found[-1]
    lasted_s = float(event.fields["lasted_s"])
    usual = step_seconds(view)
    pauses = max(_longest(view, metric) for metric in _PAUSES)
    longest = max(pauses, _longest(view, "timing_s/step"))
    least = max(LEAST_S, STEPS * usual, LONGEST * longest) if usual > 0 else UNTIMED_S
    if (stage_s := _stage_seconds(view, event.text)) > 0.0:
        least = min(least, max(LEAST_S, usual + STEPS * stage_s))
    if _SAYS_IT_HANGS.search(event.text):
        least = min(least, max(LEAST_S, LONGEST * longest))
    if _is_hopeless(event.text):
        least = max(LEAST_S, LONGEST * pauses)
    if lasted_s < least:
        return None
    step = int(view.run.steps[-1]) if event.step is None else event.step
    says = f"{num(lasted_s)} s long, {event.fields['count']} times and to the end of the log: {event.text}"
    if usual > 0:
        says += f" (a step takes {num(usual)} s)"
    told = (_rule_of(words) for words in (event.text, *event.fields.get("beside", ())))
    told_by = next(filter(None, told), None)
    return Standstill(step, event.text, lasted_s, told_by, Evidence(metric="log", step=step, says=says))


_STAGES = {
    "update_actor": r"update_actor|update_policy|actor_train|train_step",
    "update_weights": r"update_weights|sync_weights|weight_sync|param_sync",
    "old_log_prob": r"(?:old|compute)_log_?probs?",
    "ref": r"ref_log_?probs?",
}


def _stage_seconds(view: View, words: str) -> float:
    """Usual seconds of the trainer's stage that a line says the run stands in; 0 where it names none that is timed."""
    for stage, pattern in _STAGES.items():
        if view.has(f"timing_s/{stage}") and re.search(pattern, words):
            return view.level(f"timing_s/{stage}")
    return 0.0


def _longest(view: View, metric: str) -> float:
    return float(np.nanmax(view.values[metric])) if view.count(metric) else 0.0


def _rule_of(words: str) -> str | None:
    return next((rule for rule, pattern in _TOLD_BY if re.search(pattern, words.lower())), None)


def _is_hopeless(words: str) -> bool:
    """Whether a line waits for more of what nothing is in work: then no step takes so long, however slow."""
    pairs = [*_OF.findall(words), *((had, wanted) for wanted, had in _COUNTED.findall(words))]
    short = any(int(had) < int(wanted) for had, wanted in pairs)
    return short and _NOTHING_COMES.search(words) is not None
