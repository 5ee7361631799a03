"""The decision tree: which rules there are, in which order, and which findings are only consequences of others.

Order: data → version → asynchrony → implementation, from frequent and cheap to check to rare and dear. Rules
judge independently; a finding that an earlier cause explains, and that does not begin before it, is moved to
the consequences. What is left first is the cause. States of the algorithm (a learning rate that is too high, a
reward that is saturated, data that are exhausted) are not faults of the system: they are said beside it, and
they explain what follows from them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace

from rollbook.diagnose import cost, four_signals, states, stops
from rollbook.diagnose.as_logged import as_logged
from rollbook.diagnose.finding import (
    Area,
    Diagnosis,
    Evidence,
    Finding,
    NotJudged,
    OtherRun,
    RuleFailed,
    State,
)
from rollbook.diagnose.rules import (
    absurd_gradient,
    all_rejected,
    all_right,
    all_wrong,
    buffer_never_fills,
    collective_hang,
    dead_sandbox_pool,
    dead_scorer,
    discontinuity_after_resume,
    engine_mismatch,
    filter_starvation,
    fragmentation,
    late_oom_with_length,
    mismatch_to_nan,
    missed_weight_sync,
    no_update,
    not_finite,
    object_store_spill,
    one_source_all_zero,
    oom_in_sync,
    refused_publication,
    replica_died,
    run_stopped,
    sandbox_leak,
    silent_error_after_wake,
    slow_environment,
    slow_generation,
    slow_replica,
    stale_samples,
    tail_burst,
    version_drift,
)
from rollbook.diagnose.series import COMPLAINT, RunSeries
from rollbook.diagnose.view import View

Rule = Callable[[View], "Finding | NotJudged | None"]

RULES: dict[str, Rule] = {
    # data
    "dead_sandbox_pool": dead_sandbox_pool.judge,
    "sandbox_leak": sandbox_leak.judge,
    "slow_environment": slow_environment.judge,
    "one_source_all_zero": one_source_all_zero.judge,
    "filter_starvation": filter_starvation.judge,
    "dead_scorer": dead_scorer.judge,
    "all_wrong": all_wrong.judge,
    "all_right": all_right.judge,
    # version
    "refused_publication": refused_publication.judge,
    "missed_weight_sync": missed_weight_sync.judge,
    "version_drift": version_drift.judge,
    "discontinuity_after_resume": discontinuity_after_resume.judge,
    # asynchrony
    "stale_samples": stale_samples.judge,
    "buffer_never_fills": buffer_never_fills.judge,
    # implementation
    "silent_error_after_wake": silent_error_after_wake.judge,
    "mismatch_to_nan": mismatch_to_nan.judge,
    "engine_mismatch": engine_mismatch.judge,
    "collective_hang": collective_hang.judge,
    "oom_in_sync": oom_in_sync.judge,
    "late_oom_with_length": late_oom_with_length.judge,
    "fragmentation": fragmentation.judge,
    "object_store_spill": object_store_spill.judge,
    "tail_burst": tail_burst.judge,
    "slow_replica": slow_replica.judge,
    "slow_generation": slow_generation.judge,
    "replica_died": replica_died.judge,
    "all_rejected": all_rejected.judge,
    "not_finite": not_finite.judge,
    "absurd_gradient": absurd_gradient.judge,
    "no_update": no_update.judge,
    "run_stopped": run_stopped.judge,
}

AREAS: tuple[Area, ...] = ("data", "version", "async", "implementation")

EXPLAINS: dict[str, frozenset[str]] = {
    name: frozenset(consequences.split())
    for name, consequences in {
        "silent_error_after_wake": "engine_mismatch missed_weight_sync mismatch_to_nan stale_samples version_drift"
        " one_source_all_zero dead_sandbox_pool filter_starvation tail_burst late_oom_with_length buffer_never_fills"
        " all_rejected not_finite discontinuity_after_resume",
        "missed_weight_sync": "stale_samples version_drift engine_mismatch mismatch_to_nan buffer_never_fills"
        " filter_starvation one_source_all_zero all_rejected not_finite",
        "version_drift": "stale_samples engine_mismatch mismatch_to_nan missed_weight_sync buffer_never_fills"
        " all_rejected",
        "discontinuity_after_resume": "stale_samples engine_mismatch missed_weight_sync one_source_all_zero"
        " dead_sandbox_pool filter_starvation",
        "dead_sandbox_pool": "one_source_all_zero sandbox_leak slow_environment filter_starvation buffer_never_fills"
        " tail_burst stale_samples object_store_spill",
        "sandbox_leak": "dead_sandbox_pool slow_environment buffer_never_fills tail_burst stale_samples"
        " object_store_spill one_source_all_zero",
        "one_source_all_zero": "filter_starvation buffer_never_fills",
        "filter_starvation": "buffer_never_fills tail_burst stale_samples",
        "stale_samples": "engine_mismatch missed_weight_sync mismatch_to_nan buffer_never_fills all_rejected",
        "buffer_never_fills": "stale_samples",
        "mismatch_to_nan": "engine_mismatch missed_weight_sync run_stopped all_rejected not_finite tail_burst"
        " collective_hang buffer_never_fills",
        "engine_mismatch": "filter_starvation all_rejected not_finite",
        "no_update": "filter_starvation",
        "not_finite": "run_stopped filter_starvation one_source_all_zero tail_burst collective_hang",
        "late_oom_with_length": "oom_in_sync fragmentation tail_burst collective_hang run_stopped",
        "oom_in_sync": "collective_hang late_oom_with_length fragmentation discontinuity_after_resume run_stopped",
        "tail_burst": "buffer_never_fills late_oom_with_length stale_samples",
        "fragmentation": "late_oom_with_length run_stopped",
        "object_store_spill": "buffer_never_fills run_stopped sandbox_leak",
        "collective_hang": "buffer_never_fills run_stopped",
        "slow_replica": "buffer_never_fills tail_burst stale_samples",
        "slow_environment": "buffer_never_fills tail_burst stale_samples",
        "replica_died": "version_drift missed_weight_sync stale_samples slow_replica buffer_never_fills tail_burst",
        "dead_scorer": "one_source_all_zero dead_sandbox_pool filter_starvation buffer_never_fills",
        "all_wrong": "one_source_all_zero filter_starvation buffer_never_fills",
        "all_right": "filter_starvation buffer_never_fills",
    }.items()
}
"""Cause -> findings that follow from it."""

LEAST_CONFIDENCE = 0.5


def diagnose(run: RunSeries) -> Diagnosis:
    """Judge a run by every rule and put causes before consequences."""
    view = View.of(run)
    judged = [_answer(name, rule, view) for name, rule in RULES.items()]
    known_states = states.judge(view)
    standing = _standing(view, [j for j in judged if isinstance(j, Finding)], known_states)
    trifles = [f for f in standing if cost.is_trifle(view, f)]
    causes, consequences = _told_apart(view, [f for f in standing if f not in trifles])
    diagnosis = Diagnosis(
        source=run.source,
        format=run.format,
        first_step=int(run.steps[0]),
        last_step=int(run.steps[-1]),
        num_steps=run.num_steps,
        findings=tuple(_in_words(view, cause) for cause in causes),
        consequences=tuple(consequences),
        states=tuple(s for s in known_states if not causes or s.name not in states.OF_A_WELL_SYSTEM),
        signals=four_signals.judge(view),
        not_judged=tuple(_for_framework(run, j) for j in judged if isinstance(j, NotJudged)),
        notes=(
            *run.notes,
            *filter(None, (replica_died.note(view), stops.note(view))),
            *(cost.note(view, trifle) for trifle in trifles),
        ),
        renamed=run.renamed,
    )
    return as_logged(diagnosis, view)


def _answer(name: str, rule: Rule, view: View) -> Finding | NotJudged | None:
    """What a rule says; one that raises leaves the others their say."""
    try:
        return rule(view)
    except Exception as error:
        warnings.warn(f"the rule {name} failed: {error!r}", RuleFailed, stacklevel=2)
        collect = f"nothing: the rule failed with {error!r}; report it with the log"
        return NotJudged(rule=name, lacks="answer of a rule that failed", missing=(), collect=collect)


def _standing(view: View, found: list[Finding], known: list[State]) -> list[Finding]:
    """The findings that are sure enough, that no other one says better, and that are no state of the algorithm."""
    found = [f for f in found if f.confidence >= LEAST_CONFIDENCE]
    ended = stops.stop(view)
    if ended is not None and any(f.rule == ended.told_by for f in found):
        found = [f for f in found if f.rule != run_stopped.RULE]
    found = [f for f in found if f.rule != slow_generation.RULE] or found  # whose cause another one tells
    return [f for f in found if not _is_of_the_algorithm(view, f, known)]


def _told_apart(view: View, found: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """(causes, consequences), each the surest first, then what the log ended in, then in the order of the tree."""
    found = sorted(
        found,
        key=lambda f: (-round(f.confidence, 1), not _is_of_the_end(view, f), AREAS.index(f.area), f.step),
    )
    causes: list[Finding] = []
    consequences: list[Finding] = []
    for finding in found:
        explained = any(_explains(view, other, finding) for other in found if other is not finding)
        (consequences if explained else causes).append(finding)
    if not causes and consequences:
        # Two explain each other: the surer one is the cause, of equals the rule asked first.
        first = min(consequences, key=lambda f: (-round(f.confidence, 1), [*RULES].index(f.rule)))
        consequences.remove(first)
        causes.append(first)
    return causes, consequences


def _is_of_the_algorithm(view: View, finding: Finding, known: list[State]) -> bool:
    """Whether a state of the algorithm began first and brings about what the finding stands on."""
    for state in known:
        follows = states.BRINGS_ABOUT.get(state.name, frozenset())
        if finding.rule in states.BY_LONGER_ANSWERS and not states.answers_grow(view, finding.step):
            continue
        if finding.rule in follows and state.step <= finding.step + max(8, view.n // 12):
            return True
    return False


def _is_of_the_end(view: View, finding: Finding) -> bool:
    """Whether a finding stands on the words in which the log ends: what stopped it goes before what it lived with."""
    return any(item.metric == "log" and item.step >= view.step_at(view.n - 1) for item in finding.evidence)


def _explains(view: View, cause: Finding, finding: Finding) -> bool:
    """Whether `finding` is one of the cause's consequences and does not begin well before it. Of two that explain each
    other, one that is dated by the foot of a ramp counts from what it ends in."""
    if finding.rule not in EXPLAINS.get(cause.rule, ()):
        return False
    mutual = cause.rule in EXPLAINS.get(finding.rule, ())
    begins = max([finding.step, *(item.step for item in finding.evidence)]) if mutual else finding.step
    if cause.step > begins + _slack(view):
        return False
    if cause.confidence < finding.confidence - 0.3:
        return False  # a guess explains no certainty away
    return not mutual or cause.confidence >= finding.confidence


def _slack(view: View) -> int:
    """Steps within which two onsets are one."""
    return max(6, int(0.08 * (view.steps[-1] - view.steps[0] + 1)))


def _in_words(view: View, finding: Finding) -> Finding:
    """The finding with the error that the log repeats most since it began, where no evidence is in the log's words."""
    if any(item.metric == "log" for item in finding.evidence):
        return finding
    earliest = finding.step - _slack(view) - 1
    since = [e for e in view.events(COMPLAINT) if e.step is not None and e.step >= earliest]
    most = max(since, key=lambda event: event.fields["num"], default=None)
    if most is None or most.step is None:
        return finding
    says = f"{most.fields['num']} lines since step {most.step + 1} and none before, as: {most.text[:200]}"
    return replace(
        finding, evidence=(*finding.evidence, Evidence(metric="log", step=most.step + 1, says=says))
    )


def _for_framework(run: RunSeries, missing: NotJudged) -> NotJudged:
    """Leave out how verl is told to log it where the log is known to be another's."""
    if run.format in ("verl-file", "verl-console", "tensorboard", "wandb"):
        return missing
    return replace(missing, collect=re.sub(r" \(verl[^)]*\)", "", missing.collect))


def in_short(run: RunSeries) -> OtherRun:
    """One line of a run that stands in the same log as the one that was asked for."""
    found = diagnose(run)
    first = found.findings[0] if found.findings else None
    return OtherRun(
        run_idx=run.run_idx,
        num_steps=run.num_steps,
        verdict=found.verdict,
        title=first.title if first else "",
        step=first.step if first else None,
    )
