"""A diagnosis as text for a terminal of 80 columns: the verdict on one screen, then evidence, then what is missing."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence

from rollbook.diagnose.finding import Diagnosis, Evidence, Finding, NotJudged, OtherRun
from rollbook.diagnose.states import MOVES
from rollbook.diagnose.wording import in_full, num
from rollbook.observe.numbers import counted

AREA_NAMES = {
    "data": "data and environments",
    "version": "weights and versions",
    "async": "asynchrony",
    "implementation": "implementation",
}


def to_text(diagnosis: Diagnosis, *, width: int = 80, tells_all: bool = False) -> str:
    """The whole report, verdict first.

    Args:
        width: columns of the terminal.
        tells_all: say of each rule that could not be judged what to log for it, instead of naming it.
    """
    lines = _header(diagnosis, width)
    for i, finding in enumerate(diagnosis.findings):
        lines += _finding(finding, width, is_first=i == 0)
    if diagnosis.is_well:
        lines += _well(diagnosis, width)
    lines += _other_runs(diagnosis, width)
    lines += _signals(diagnosis, width)
    for state in diagnosis.states:
        lines += ["", *_block(f"the algorithm, since step {state.step}:", state.title, width)]
        lines += _evidence(state.evidence, width)
        lines += _block("  advice:", state.advice, width)
    if diagnosis.consequences:
        lines += ["", "what follows from it:"]
        lines += [f"  step {f.step:>6}  {f.title}"[:width] for f in diagnosis.consequences]
    if diagnosis.not_judged:
        lines += ["", *(_how_to_collect if tells_all else _not_judged)(diagnosis.not_judged, width)]
    if diagnosis.notes:
        lines += ["", "about the log:"]
        for note in diagnosis.notes:
            lines += _block("  -", note, width)
    return "\n".join(lines) + "\n"


def _header(diagnosis: Diagnosis, width: int) -> list[str]:
    source = diagnosis.source
    about = f" · {diagnosis.format} · steps {diagnosis.first_step} to {diagnosis.last_step}"
    if len(source) + len(about) > width:
        source = "…" + source[-(width - len(about) - 1) :]
    return [source + about, ""]


def _finding(finding: Finding, width: int, *, is_first: bool) -> list[str]:
    lines = _block("FOUND:" if is_first else "ALSO FOUND, independently:", finding.title, width)
    until = f" until step {finding.until_step}" if finding.until_step is not None else ""
    about = (
        f"since step {finding.step}{until} · confidence {finding.confidence:.2f} · {AREA_NAMES[finding.area]}"
    )
    lines += _block(f"  {finding.rule} ·", about, width)
    costs = []
    if finding.cost_s:
        costs.append(f"{num(finding.cost_s)} s so far")
    if finding.cost_reward:
        costs.append(f"{num(finding.cost_reward)} of mean reward")
    if costs:
        lines.append("  cost: " + ", ".join(costs))
    lines += _evidence(finding.evidence, width)
    lines += _block("  do:  ", finding.action, width)
    lines += _block("  next:", finding.next_check, width)
    lines.append("")
    return lines


def _evidence(evidence: Iterable[Evidence], width: int) -> list[str]:
    lines = []
    for item in evidence:
        label, says = in_full(item)
        lines += _block(f"  · {label}:", says, width)
    return lines


def headline(diagnosis: Diagnosis) -> tuple[str, str]:
    """(label, sentence) of a run without a finding: no more than the signals that were logged can prove."""
    missing = diagnosis.missing_signals
    explained = frozenset[str]().union(*(MOVES.get(state.name, ()) for state in diagnosis.states))
    moved = [s.name for s in diagnosis.signals if s.verdict == "moved" and s.name not in explained]
    but = f", but look at {_quoted(moved)}, which moved" if moved else ""
    limited = f"; what limits the run: {diagnosis.states[0].title}" if diagnosis.states else ""
    if len(missing) == len(diagnosis.signals):
        return "NOT JUDGED", "too little was logged to judge the system"
    if failed := diagnosis.failed_rules:
        return (
            "NOT JUDGED",
            f"nothing else is wrong, but rules failed on this log: {', '.join(failed)}{but}{limited}",
        )
    if diagnosis.verdict == "not_judged":
        says = f"nothing wrong shows in what was logged, but that is too little: {_without(missing)}"
        return "NOT JUDGED", says + but + limited
    as_far = f", as far as it can be judged {_without(missing)}" if missing else ""
    return "NONE OF THESE", f"the system is well{as_far}{but}{limited}"


def _well(diagnosis: Diagnosis, width: int) -> list[str]:
    label, says = headline(diagnosis)
    return [*_block(f"{label}:", says, width), ""]


def _without(missing: Sequence[str]) -> str:
    return f"without {_quoted(missing)}"


def _quoted(signals: Sequence[str]) -> str:
    names = [f'"{name}"' for name in signals]
    return " and ".join([", ".join(names[:-1]), names[-1]]) if len(names) > 1 else names[0]


def other_run(other: OtherRun) -> tuple[str, str]:
    """(label, sentence) of another run of the log, or of another log of the folder."""
    what = f"{other.title}, since step {other.step}" if other.title else other.verdict.replace("_", " ")
    if other.log:
        return f"another log, {other.log}, {counted(other.num_steps, 'step')}", what
    label = f"run {other.run_idx} of the same log, {counted(other.num_steps, 'step')}"
    return label, f"{what} (read it with --run {other.run_idx})"


def _other_runs(diagnosis: Diagnosis, width: int) -> list[str]:
    lines: list[str] = []
    for label, says in map(other_run, diagnosis.other_runs):
        lines += _block(f"{label}:", says, width)
    return [*lines, ""] if lines else []


def _signals(diagnosis: Diagnosis, width: int) -> list[str]:
    lines = ["the four signals:"]
    for signal in diagnosis.signals:
        lines += _block(f"  {signal.verdict:<13} {signal.name}:", signal.says, width)
    return lines


def _not_judged(missing: Sequence[NotJudged], width: int) -> list[str]:
    """The rules' names by what the log lacks."""
    rules = _rules_by(lambda item: item.lacks, missing)
    says = " · ".join(f"no {lack}: {', '.join(names)}" for lack, names in rules.items())
    return ["could not be judged (--all says what to log for it):", *_block(" ", says, width)]


def _how_to_collect(missing: Sequence[NotJudged], width: int) -> list[str]:
    lines = ["could not be judged, for want of a signal:"]
    for collect, names in _rules_by(lambda item: item.collect, missing).items():
        lines += _block(f"  {', '.join(names)}:", collect, width)
    return lines


def _rules_by(key: Callable[[NotJudged], str], missing: Sequence[NotJudged]) -> dict[str, list[str]]:
    rules: dict[str, list[str]] = {}
    for item in missing:
        rules.setdefault(key(item), []).append(item.rule)
    return rules


def _block(label: str, text: str, width: int) -> list[str]:
    """`label text`, wrapped and indented under the label's first column."""
    indent = " " * (len(label) - len(label.lstrip()) + 4)
    return textwrap.wrap(
        f"{label} {text}", width=width, subsequent_indent=indent, break_on_hyphens=False, drop_whitespace=True
    )
