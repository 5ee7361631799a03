"""Every metric a run may report: unit, numerator, denominator, reduction, owner, one line of meaning.

Names are verl's where the meaning is the same, so that dashboards carry over; the rest follow the glossary.
A name with `{...}` is a family: `reward/{source}/mean` covers `reward/gsm8k/mean`. `docs/metrics.md` is
printed from this file (`python -m rollbook.observe.catalogue`).
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Reduction = Literal["ratio", "sum", "max", "min", "last", "quantile", "std"]
"""How two readings of one step become one. ratio: sums of numerators over sums of denominators; quantile and
std: computed once over all items of the step, never averaged."""

STAGES: dict[str, str] = {
    # span name -> suffix of timing_s/… and expected_s/…
    "rollout": "gen",
    "reward": "reward",
    "pack": "pack",
    "proximal": "old_log_prob",
    "reference": "ref",
    "teacher": "teacher",
    "values": "values",
    "adv": "adv",
    "critic": "update_critic",
    "train": "update_actor",
    "sync": "update_weights",
    "checkpoint": "save_checkpoint",
    "eval": "testing",
    "to_rollout": "switch_to_rollout",
    "to_trainer": "switch_to_trainer",
    "warmup": "warmup",
}
"""The stages of a step: spans directly under `recorder.step`; on the right verl's name where it has one."""

ELSEWHERE = "elsewhere"
"""Owner of metrics that rollbook reads in other systems' logs, shows and judges by, and does not write itself."""

STAGES_ELSEWHERE = frozenset({"reward"})
"""Stages of other systems' logs alone: rollbook scores while it generates."""

STAGES_OUTSIDE_STEP = frozenset({"eval", "warmup"})
"""Stages that `timing_s/step` leaves out, as verl does: they are not part of the work being planned."""

_STAGE_MEANING = {
    "rollout": "the step loop's wait for finished trajectories; under `sync` the whole generation",
    "reward": "scoring that the step loop waits for",
    "pack": "building the train batch",
    "proximal": "the trainer's logprobs at the start of the step",
    "reference": "the reference policy's logprobs",
    "teacher": "the teacher's logprobs",
    "values": "the critic's values",
    "adv": "advantages",
    "critic": "updates of the critic",
    "train": "updates of the policy",
    "sync": "publication of the weights to every replica",
    "checkpoint": "writing the RL state",
    "eval": "evaluation on held-out prompts; not part of `timing_s/step`",
    "to_rollout": "handing the device to the engine (wake)",
    "to_trainer": "handing the device to the trainer (sleep)",
    "warmup": "supervised warm-up; not part of `timing_s/step`",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the catalogue."""

    name: str
    unit: str
    numerator: str
    denominator: str
    """"" where the metric is not a quotient."""
    reduction: Reduction
    owner: str
    """Folder that reports it."""
    meaning: str


_STATISTICS: dict[str, tuple[str, Reduction, str]] = {
    # statistic -> numerator, reduction, first word of the meaning
    "mean": ("sum of", "ratio", "Mean"),
    "max": ("largest", "max", "Largest"),
    "min": ("smallest", "min", "Smallest"),
    "p50": ("median of", "quantile", "Median"),
    "p95": ("95th percentile of", "quantile", "95th percentile"),
    "p99": ("99th percentile of", "quantile", "99th percentile"),
    "std": ("standard deviation of", "std", "Standard deviation"),
}


@functools.cache
def catalogue() -> tuple[Metric, ...]:
    """Every metric and family, stages first."""
    metrics: list[Metric] = []
    for stage, suffix in STAGES.items():
        measured = f"Stage `{stage}`: {_STAGE_MEANING[stage]}."
        expected = f"What the ledger expects of `{stage}`, for the work that the step got."
        owner = ELSEWHERE if stage in STAGES_ELSEWHERE else "observe"
        metrics.append(Metric(f"timing_s/{suffix}", "s", "seconds", "", "sum", owner, measured))
        if stage in STAGES_ELSEWHERE:
            continue
        metrics.append(Metric(f"expected_s/{suffix}", "s", "seconds", "", "sum", "ledger", expected))
        waited = (
            f"Seconds of `{stage}` in which a thread of this process could have run and got no core (Linux)."
        )
        metrics.append(Metric(f"core_wait_s/{suffix}", "s", "seconds", "", "sum", "observe", waited))
    text = resources.files("rollbook.observe").joinpath("catalogue.toml").read_text(encoding="utf-8")
    for name, (unit, numerator, denominator, reduction, owner, meaning) in tomllib.loads(text).items():
        if reduction != "spread":
            metrics.append(Metric(name, unit, numerator, denominator, reduction, owner, meaning))
            continue
        prefix, statistics = name.rstrip("}").split("{")
        for statistic in statistics.split("|"):
            of, reduced_by, word = _STATISTICS[statistic]
            items = denominator if reduced_by == "ratio" else ""
            metrics.append(
                Metric(
                    f"{prefix}{statistic}",
                    unit,
                    f"{of} {numerator}",
                    items,
                    reduced_by,
                    owner,
                    f"{word}: {meaning}.",
                )
            )
    return tuple(metrics)


@functools.cache
def _index() -> tuple[dict[str, Metric], list[tuple[re.Pattern[str], Metric]]]:
    exact = {m.name: m for m in catalogue() if "{" not in m.name}
    families = [(_pattern(m.name), m) for m in catalogue() if "{" in m.name]
    return exact, families


def _pattern(name: str) -> re.Pattern[str]:
    # A data source may be called "openai/gsm8k"; every other placeholder is one word.
    def fits(part: str) -> str:
        if not part.startswith("{"):
            return re.escape(part)
        return f"(?P<{part[1:-1]}>{'.+' if part == '{source}' else '[^/]+'})"

    return re.compile("".join(fits(part) for part in re.split(r"(\{\w+\})", name)))


@functools.lru_cache(maxsize=4096)
def lookup(name: str) -> Metric | None:
    """The catalogue's line for a metric name, or None. The first family that fits stands."""
    found = match(name)
    return found[0] if found else None


def match(name: str) -> tuple[Metric, dict[str, str]] | None:
    """A metric name's line, and what stands for the placeholders of its family.

    >>> metric, labels = match("reward/gsm8k/mean")
    >>> metric.name, labels
    ('reward/{source}/mean', {'source': 'gsm8k'})
    """
    exact, families = _index()
    if name in exact:
        return exact[name], {}
    for pattern, metric in families:
        if fits := pattern.fullmatch(name):
            return metric, fits.groupdict()
    return None


def names() -> list[str]:
    """Every name, families with their placeholders."""
    return [metric.name for metric in catalogue()]


def to_markdown() -> str:
    """The text of `docs/metrics.md`."""
    from rollbook.observe.events import EVENT_KINDS

    lines = [
        "# Metrics and events",
        "",
        "Printed by `python -m rollbook.observe.catalogue` from `src/rollbook/observe/`; edit there, not here.",
        "",
        '`metrics.jsonl` holds one line a step, `{"step": N, "data": {name: value}}`. A value that was not',
        "finite is `null`; a mean over nothing is left out. A step that was repeated after a resume stands",
        "twice: name by name, the later value counts. Names are verl's where the meaning is the same.",
        "",
        "## Stages",
        "",
        "| span | seconds | expected |",
        "|---|---|---|",
        *(
            f"| `{stage}` | `timing_s/{suffix}` | {'–' if stage in STAGES_ELSEWHERE else f'`expected_s/{suffix}`'} |"
            for stage, suffix in STAGES.items()
        ),
        "",
        "## Metrics",
        "",
        "Reduction `ratio` is the sum of numerators over the sum of denominators, over micro batches, ranks",
        "and replicas; `quantile` and `std` are computed once over all items of a step.",
        f"Owner `{ELSEWHERE}`: read in other systems' logs, shown and judged by; rollbook itself does not write it.",
        "",
        "| name | unit | numerator | denominator | reduction | owner | meaning |",
        "|---|---|---|---|---|---|---|",
    ]
    for m in catalogue():
        cells = (f"`{m.name}`", m.unit, m.numerator, m.denominator or "–", m.reduction, m.owner, m.meaning)
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Events",
        "",
        "`events.jsonl` holds one object a line: `kind`, `at_s` (unix seconds), `mono_s` (monotonic clock of",
        "the writing process; only differences mean something), `step` where one is open, and:",
        "",
        "| kind | fields | meaning |",
        "|---|---|---|",
        *(
            f"| `{kind}` | {', '.join(f'`{f}`' for f in e.fields) or '–'} | {e.meaning} |"
            for kind, e in EVENT_KINDS.items()
        ),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(to_markdown(), end="")
