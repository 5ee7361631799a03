"""The table of event kinds is what runs write: no kind without a writer, no writer without a kind."""

from __future__ import annotations

import re
from pathlib import Path

import rollbook
from rollbook.observe.events import EVENT_KINDS
from tiny_run import TinyRun

WRITERS = re.compile(r'\b(?:_?event|_write_event)\(\s*((?:"\w+"(?: if \w+ else )?)+)')


def written_kinds() -> set[str]:
    """Of every call in the package that names one."""
    sources = "\n".join(path.read_text() for path in Path(rollbook.__file__).parent.rglob("*.py"))
    named = {kind for call in WRITERS.findall(sources) for kind in re.findall(r'"(\w+)"', call)}
    return named | set(re.findall(r'yield \(?\s*"(\w+)",', sources))


def test_every_kind_is_written_by_some_part() -> None:
    assert sorted(EVENT_KINDS.keys() - written_kinds()) == []


def test_failures_and_evictions_are_told_with_their_own_words(tiny_run: TinyRun) -> None:
    flaky = {"function": "tiny_rewards:raises_on_even", "isolation": "inline", "is_tested": False}
    run = tiny_run(
        num_steps=2,
        config={"reward": {"terms": [flaky]}},
        **{"rollout.group_size": 4, "run.max_failure_frac": 1.0, "algorithm.filter.drop_flat": True},
    )
    failures = run.events_of("failure")
    assert failures and {event["failure"] for event in failures} == {"reward"}
    assert sum(event["num_trajectories"] for event in failures) == sum(m["failures/num"] for m in run.metrics)
    assert all("even length" in event["message"] for event in failures)
    (begun, *saved) = run.events_of("checkpoint")
    assert begun["path"] == "checkpoints/step_0" and begun["num_bytes"] > 0 and len(saved) == 1
