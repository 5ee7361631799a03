"""The duty manual and derivation record of one job, as Markdown or as a page: what it is, what it should take, the four
signals with this job's thresholds, the decision tree, the alerts, and the commands to have at hand."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollbook.diagnose.manual import ENTRIES
from rollbook.diagnose.report import AREA_NAMES
from rollbook.diagnose.tree import AREAS
from rollbook.diagnose.wording import num
from rollbook.observe.alerts import ALERTS, Thresholds


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The facts of a run config that a manual needs; no other part of the config is looked at."""

    name: str
    run_dir: str
    config: str
    """Path of the config."""
    model: str
    schedule: str
    num_steps: int
    groups_per_step: int
    group_size: int
    max_response_tokens: int
    sources: tuple[str, ...]
    algorithm: str
    engine: str
    num_replicas: int
    num_slots: int
    max_staleness_steps: int
    sync_every_steps: int
    transport: str
    bucket_bytes: int
    micro_batch_tokens: int
    max_refills_per_step: int
    group_deadline_s: float
    step_deadline_s: float
    max_failure_frac: float
    has_environment: bool
    has_filter: bool
    checkpoint_every_steps: int
    memory: tuple[tuple[str, str], ...] = ()
    """(what, bytes and how they follow), where the model's shape is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Derivation:
    """What the planner derives before a run has begun."""

    machine: str
    notes: tuple[str, ...]
    """What was assumed, and what does not fit."""
    steps: tuple[tuple[str, str], ...]
    """(title, reasoning) of the six steps."""
    stages: Mapping[str, tuple[float, float, float]]
    """Stage of the job's own schedule -> (seconds, low, high)."""
    step_s: float


def to_markdown(
    job: Job,
    thresholds: Thresholds,
    *,
    plan: Mapping[str, Any] | None = None,
    derivation: Derivation | None = None,
    why_not: str = "",
) -> str:
    """The manual.

    Args:
        plan: the run directory's `plan.json`, when the run has begun.
        derivation: the planner's, until then.
        why_not: why there is neither, and what helps.
    """
    filled = _filled(job, thresholds)
    parts = [
        f"# Duty manual of `{job.name}`",
        "",
        f"Made from `{job.config}`. Ten minutes, in this order; every number below is this job's.",
        "",
        *_job(job),
        *_record(job, plan, derivation, why_not),
        *_signals(job, thresholds),
        *_tree(filled),
        *_states(),
        *_alerts(thresholds, job),
        *_commands(job, thresholds),
    ]
    return "\n".join(parts) + "\n"


def _filled(job: Job, thresholds: Thresholds) -> dict[str, str]:
    bound = job.max_staleness_steps
    values: dict[str, object] = {
        **asdict(thresholds),
        "staleness_sign": f"near {bound} all the time" if bound else "above 0 in any step",
        "max_staleness_steps": job.max_staleness_steps,
        "max_spread": max(1, job.max_staleness_steps),
        "sources": ", ".join(f"`{s}`" for s in job.sources),
        "max_refills": job.max_refills_per_step,
        "groups_per_step": job.groups_per_step,
        "group_deadline_s": job.group_deadline_s,
        "max_response_tokens": job.max_response_tokens,
        "bucket_bytes": job.bucket_bytes,
        "micro_batch_tokens": job.micro_batch_tokens,
    }
    return {k: num(float(v)) if isinstance(v, int | float) else str(v) for k, v in values.items()}


def _job(job: Job) -> list[str]:
    sequences = job.groups_per_step * job.group_size
    waves = -(-sequences // max(1, job.num_slots * job.num_replicas))
    rows = [
        ("model", job.model),
        ("algorithm, schedule", f"{job.algorithm}, {job.schedule}"),
        ("a step", f"{job.groups_per_step} groups x {job.group_size} = {sequences} trajectories"),
        (
            "responses",
            f"at most {job.max_response_tokens} tokens: {sequences * job.max_response_tokens:,} a step at most",
        ),
        (
            "generation",
            f"{job.num_replicas} x {job.engine}, {job.num_slots} slots each: {waves} wave{'s' if waves > 1 else ''}",
        ),
        (
            "staleness",
            f"at most {job.max_staleness_steps} steps; published every {job.sync_every_steps} by {job.transport}",
        ),
        ("deadlines", f"{num(job.group_deadline_s)} s a group, {num(job.step_deadline_s)} s a step"),
        (
            "checkpoints",
            f"every {job.checkpoint_every_steps} steps"
            if job.checkpoint_every_steps
            else "after the last step and on Ctrl-C: set checkpoint.every_steps for more",
        ),
    ]
    return ["## The job", "", *_table(("what", "value"), [*rows, *job.memory]), ""]


def _record(
    job: Job, plan: Mapping[str, Any] | None, derivation: Derivation | None, why_not: str
) -> list[str]:
    lines = ["## Derivation record", ""]
    stages = plan.get("stages") if plan else None
    if (not isinstance(stages, Mapping) or not stages) and derivation is not None:
        return [*lines, *_derived(job, derivation)]
    if not isinstance(stages, Mapping) or not stages:
        return [*lines, f"Nothing could be derived from the config alone. {why_not}", ""]
    rows = []
    total = 0.0
    for name, entry in stages.items():
        seconds = float(entry.get("seconds") or 0.0)
        total += seconds
        reach = f"{num(float(entry['low']))} to {num(float(entry['high']))}" if entry.get("high") else ""
        rows.append((name, num(seconds), reach, str(entry.get("formula", "")), str(entry.get("source", ""))))
    rows.append(("together", num(total), "", "", ""))
    return [*lines, *_table(("stage", "seconds", "range", "formula", "source"), rows), ""]


def _derived(job: Job, derivation: Derivation) -> list[str]:
    lines = [
        f"Derived from the config for {derivation.machine}, before the run has begun. When it begins, "
        f"`{job.run_dir}/plan.json` takes this one's place: the same stages, by coefficients of its own model.",
        "",
    ]
    for note in derivation.notes:
        lines += [f"Note: {note}.", ""]
    for number, (title, because) in enumerate(derivation.steps, start=1):
        lines += [f"### Step {number}. {title}", "", " ".join(because.split()), ""]
    rows = [
        (name, num(seconds), f"{num(low)} to {num(high)}")
        for name, (seconds, low, high) in derivation.stages.items()
    ]
    rows.append((f"the step, {job.schedule}", num(derivation.step_s), ""))
    return [*lines, *_table(("stage", "seconds", "range"), rows), ""]


def _signals(job: Job, thresholds: Thresholds) -> list[str]:
    t = thresholds
    rows = [
        (
            "reward by source",
            "`reward/<source>/mean`, `reward/<source>/zero_frac`, `failures/*`",
            f"no source at zero; failures below {num(t.max_failed_frac)} (the run stops at "
            f"{num(job.max_failure_frac)})",
        ),
        (
            "weight version",
            "`replica/*/weight_version`, `sync/num_failed`, `sync/probe_gap_max`",
            f"spread at most {max(1, job.max_staleness_steps)}; no failed publication; +1 every "
            f"{job.sync_every_steps} steps",
        ),
        (
            "gap",
            "`training/logprob_gap/mean`, `rollout_corr/*`",
            f"below {num(t.max_logprob_gap_nats)} nats, flat; effective sample size above "
            f"{num(t.min_eff_sample_size)}",
        ),
        (
            "staleness, length, sync",
            "`trajectory_staleness_worst/max`, `response_length/*`, `timing_s/update_weights`",
            f"staleness at most {job.max_staleness_steps}; longest response not "
            f"{num(t.max_length_growth)} times that of "
            f"hours ago; sync within {num(t.max_sync_ratio)} times the plan",
        ),
    ]
    return ["## The four signals", "", *_table(("signal", "where", "well means"), rows), ""]


def _tree(filled: Mapping[str, str]) -> list[str]:
    lines = [
        "## The decision tree",
        "",
        "`rollbook diagnose` walks it; by hand, stop at the first that fits.",
        "",
    ]
    for i, area in enumerate(AREAS, start=1):
        rows = [
            (f"`{rule}`", e.sign.format(**filled), e.not_this, e.do.format(**filled), e.next)
            for rule, e in ENTRIES.items()
            if e.area == area
        ]
        header = ("fault", "sign", "not to be confused with", "do", "next check")
        lines += [
            f"### {i}. {AREA_NAMES[area][:1].upper()}{AREA_NAMES[area][1:]}",
            "",
            *_table(header, rows),
            "",
        ]
    return lines


def _states() -> list[str]:
    rows = [
        (
            "learning rate too high",
            "step KL, clip fraction, gradient norm and entropy leave their range; the gap follows",
        ),
        ("answers explode", "`response_length/mean` and `clip_ratio` climb, the reward falls with them"),
        ("entropy collapse", "entropy near 0, answers alike"),
        ("reward falls", "below what it was at its best, and no fault of the system began there"),
        ("data exhausted", "many epochs, held-out score falls while training reward rises"),
        ("reward saturates, plateau", "the four signals are well, the reward stands"),
    ]
    return [
        "### 5. None of these",
        "",
        "The system is well; the algorithm or the data limit the run.",
        "",
        *_table(("state", "sign"), rows),
        "",
    ]


def _alerts(thresholds: Thresholds, job: Job) -> list[str]:
    rows = []
    for alert in ALERTS:
        if alert.name.startswith("Sandbox") and not job.has_environment:
            continue
        if alert.name == "FilterStarvation" and not job.has_filter:
            continue
        rows.append(
            (alert.name, alert.severity, f"`{alert.expr(thresholds)}`", f"{alert.for_s} s", alert.action)
        )
    return ["## Alerts", "", *_table(("alert", "severity", "condition", "for", "first move"), rows), ""]


def _commands(job: Job, thresholds: Thresholds) -> list[str]:
    rows = [
        (f"`rollbook diagnose {job.run_dir}`", "cause, evidence, action, next check"),
        (f"`rollbook watch {job.run_dir}`", "the one screen, live or after the fact"),
        (f"`rollbook reconcile {job.run_dir}`", "which stage lost which seconds against the plan"),
        (f"`rollbook train --resume {job.run_dir}`", "take the run up from its newest whole checkpoint"),
        (
            f"`rollbook alerts -o alerts --max-staleness-steps {job.max_staleness_steps} "
            f"--max-logprob-gap-nats {thresholds.max_logprob_gap_nats:g} "
            f"--max-failed-frac {thresholds.max_failed_frac:g}`",
            "these alerts as Prometheus rules",
        ),
        (
            f"`rollbook drill skipped_bucket_unproven {job.config}`",
            "practise: one fault put into a short run of this job",
        ),
    ]
    return ["## Commands", "", *_table(("command", "what for"), rows)]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(header), "|" + "---|" * len(header), *(line(row) for row in rows)]


_STYLE = """
:root { color-scheme: light dark; } body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; } table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; } th { text-align: left; }
td, th { border-top: 1px solid #8884; padding: .3rem .7rem .3rem 0; vertical-align: top; }
code { font-size: .9em; overflow-wrap: anywhere; }
@media print { body { max-width: none; margin: 0; } }
"""


def to_html(markdown: str) -> str:
    """The manual as a page that needs nothing else. Reads what `to_markdown` writes: headings, tables, paragraphs."""
    out: list[str] = []
    in_table = False
    for line in markdown.splitlines():
        is_row = line.startswith("|")
        if in_table and not is_row:
            out.append("</table>")
            in_table = False
        if is_row and re.fullmatch(r"\|(?:-+\|)+", line):
            continue
        if is_row:
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            tag = "td" if in_table else "th"
            out.append(
                ("" if in_table else "<table>") + "<tr>" + "".join(f"<{tag}>{_inline(c)}" for c in cells)
            )
            in_table = True
        elif match := re.match(r"(#+) (.*)", line):
            level = len(match.group(1))
            out.append(f"<h{level}>{_inline(match.group(2))}</h{level}>")
        elif line:
            out.append(f"<p>{_inline(line)}</p>")
    if in_table:
        out.append("</table>")
    title = html.escape(markdown.split("\n", 1)[0].lstrip("# ").replace("`", ""))
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><title>{title}</title>"
    return (
        f"<!doctype html><html lang=en>{head}<style>{_STYLE}</style><body>\n"
        + "\n".join(out)
        + "\n</body></html>\n"
    )


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
